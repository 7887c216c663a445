"""Everything of a rank that is equal on its replicas: models, optimizers, registered objects.

A state is a set of named tensors plus *meta*, one codec document that says how to put them back:

    model/<model>/<parameter or buffer>     optim/<optimizer>/<parameter index>/<key>
    optim/<optimizer>/group/<n>             object/<name>/<n>

Of a sharded tensor only the part that is here is exported (shards.py), under its whole name and
with the class that says which other ranks have the same part. Tensors that are the same memory
appear once, under the first name. A source exports references to its live tensors; a newcomer
prepares a place for every byte (its own tensor where memory layouts agree), has them filled from
outside, and finishes. Optimizers are filled directly and not by load_state_dict, which casts and so
is not exact. Of gradients it is kept which are absent, zero or alive; those that outlive a step
travel, too (gradients.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from keepstep.errors import UsageError
from keepstep.worker.state import codec, gradients, shards
from keepstep.worker.state.export import Export, Registrable, flat
from keepstep.worker.state.shards import PLAIN, Replicas
from keepstep.worker.state.tensors import dense

FLAGS = "keepstep/flags"
LAST = ("keepstep/ddp",)  # objects that are loaded when gradients are there

# dtype, shape and strides, kind of device, how it is spread, class
Table = dict[str, tuple[str, tuple[int, ...], tuple[int, ...], str, Any, str]]


@dataclass
class _Import:
    metas: list[dict[str, Any]]
    on_device: bool  # bytes may arrive on a GPU
    keep_gradients: bool = False  # those that are here are this rank's own
    provider: dict[str, int] = field(default_factory=dict)  # class -> which of the metas
    missing: set[str] = field(default_factory=set)
    missing_yet: set[str] = field(default_factory=set)  # objects that the script may still make
    # where bytes arrive, and where they belong if that is another tensor
    landing: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)
    described: dict[str, shards.Spec | None] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)  # class
    source: dict[str, int] = field(default_factory=dict)  # which of the metas

    def tree(self, entry: dict[str, Any]) -> Any:
        found = [shards.wrap(self.final[key], self.described[key]) for key in entry["tensors"]]
        return codec.loads(entry["data"], found)


def _providers(metas: list[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for at, meta in enumerate(metas):
        for entry in meta["table"].values():
            found.setdefault(entry[5], at)
    return found


class StateSet(Export):
    """Beside what is exported: the way in, on a newcomer."""

    def __init__(
        self,
        models: dict[str, nn.Module],
        optimizers: dict[str, Optimizer],
        objects: Mapping[str, Registrable],
        replicas: Replicas | None = None,
        ddp: Callable[[], Iterable[Any]] = tuple,
        outliving: Callable[[], bool] = bool,
    ) -> None:
        super().__init__(models, optimizers, objects, replicas, ddp, outliving)
        self.expect: Callable[[set[str]], None] = lambda _: None  # other ranks have these objects
        # Tensors that an import leaves as they are, with gradients that are here, or None.
        self.own: frozenset[str] | None = None
        # The script may still add parameter groups, or make models, that the source has; an import
        # has left such out.
        self.walking = False
        self.incomplete = False
        self.comes: Callable[[str], bool] = lambda _: False  # the script may make such an object
        # Objects that the source has seen change for the first time since the last fence, and those
        # that it has not seen change before; `blind`: nobody knows how the rank that is replaced
        # had them then.
        self.unseen: set[str] = set()
        self.unchanged: set[str] = set()
        self.blind = False
        self.natural = False  # before the first fence, where objects are as scripts build them
        self.apart: frozenset[str] = frozenset()  # objects that are this rank's own
        self.unheard: list[str] = []  # objects of this rank that the source of an import has not
        self._import: _Import | None = None

    def _same_groups(self, name: str, theirs: dict[str, Any]) -> None:
        """A newcomer walks past `add_param_group` of an earlier epoch: it is made up for here. One
        that is still to come in its walk must find the optimizer without the group."""
        optimizer = self.optimizers[name]
        mine, wanted = self.group_names(optimizer), theirs.get("names")
        known = dict(self.parameters())
        if wanted is None or mine == wanted or len(mine) > len(wanted):
            return
        used = {one for group in mine for one in group}
        more = [one for group in wanted[len(mine) :] for one in group]
        if mine == wanted[: len(mine)] and all(one in known and one not in used for one in more):
            if self.walking:
                self.incomplete = True
                return
            for group in wanted[len(mine) :]:
                optimizer.add_param_group({"params": [known[one] for one in group]})

    def prepare_import(
        self, metas: bytes | list[bytes], *, on_device: bool = False
    ) -> dict[str, Tensor]:
        """Tensors, each one dense block laid out as in the source, to be filled: on the CPU, or
        where they belong.

        Each class of this rank is taken from the first of `metas` that has it. What none of them
        has is named in `missing`, and is to be restored in another way."""
        parsed = [codec.loads_inline(m) for m in ([metas] if isinstance(metas, bytes) else metas)]
        tensors = self._model_tensors()
        shards.note_meshes(tensors.values())
        self.replicas.wrapped_by_ddp(self._ddp())
        pending = _Import(parsed, on_device, self.own is not None)
        pending.provider = _providers(parsed)
        for name, tensor in tensors.items():
            if self.own is not None and name in self.own:
                continue
            name_class = self.replicas.of(tensor)
            at = pending.provider.get(name_class)
            if at is None:
                pending.missing.add(name)
            else:
                _require_same(name, tensor, parsed[at]["table"])
                self._take(pending, name, at, tensor)
        _require_no_more(tensors, parsed[0]["table"], self.classes())
        for name in parsed[0]["optimizers"]:
            self._prepare_optimizer(pending, name)
        for name, entry in parsed[0]["objects"].items():
            self._prepare_object(pending, name, entry)
        unheard = self.objects.keys() - parsed[0]["objects"].keys()
        self.unheard = sorted(name for name in unheard if not name.startswith("keepstep/"))
        table, classes = parsed[0]["table"], self.classes()
        for key in (f"grad/{name}" for name, _ in self.parameters()):
            if key in table and table[key][5] in classes:
                self._take(pending, key, 0, None)
        self._import = pending
        return dict(pending.landing)

    def _take(self, pending: _Import, name: str, at: int, own: Tensor | None) -> None:
        dtype_name, shape, stride, device, described, kind = pending.metas[at]["table"][name]
        dtype = codec.dtype_named(dtype_name)
        if own is not None and (own.dtype != dtype or tuple(own.shape) != shape):
            own = None
        place = shards.local(own).detach() if own is not None else None
        if place is None and described is not None:
            place = shards.empty_local(described, dtype, _device(device))
        elif place is None:
            place = torch.empty_strided(shape, stride, dtype=dtype, device=_device(device))
        pending.final[name] = place
        pending.described[name] = described
        pending.of[name], pending.source[name] = kind, at
        same = described is not None or place.stride() == stride
        if (place.device.type == "cpu" or pending.on_device) and same and dense(place):
            pending.landing[name] = place
        elif described is not None:
            pending.landing[name] = torch.empty(place.shape, dtype=dtype)
        else:
            pending.landing[name] = torch.empty_strided(shape, stride, dtype=dtype)

    def _prepare_optimizer(self, pending: _Import, name: str) -> None:
        optimizer = self.optimizers.get(name)
        if optimizer is None:
            raise UsageError(f"this rank has no optimizer {name!r}, but the source has one")
        self._same_groups(name, pending.metas[0]["optimizers"][name])
        if not self.incomplete:
            _require_same_groups(name, optimizer, pending.metas[0]["optimizers"][name])
        for i, parameter in enumerate(flat(optimizer)):
            at = pending.provider.get(self.replicas.of(parameter))
            if at is None:
                continue
            meta = pending.metas[at]
            entry = meta["optimizers"][name]["entries"].get(i)
            have = optimizer.state.get(parameter)
            for key in entry["tensors"] if entry is not None else ():
                place = have.get(key.rsplit("/", 1)[1]) if isinstance(have, dict) else None
                place = place if isinstance(place, Tensor) else None
                self._take(pending, key, at, place)
        for key in pending.metas[0]["optimizers"][name]["groups"]["tensors"]:
            self._take(pending, key, 0, None)

    def _prepare_object(self, pending: _Import, name: str, entry: dict[str, Any]) -> None:
        """An object is taken as a whole from the first source, or not at all."""
        if name in self.apart:
            return  # the source has not heard of it yet
        if name not in self.objects:
            self.expect({name})
        if name not in self.objects and self.walking and self.comes(name):
            self.incomplete = True
            pending.missing_yet.add(name)
            return
        if name not in self.objects:
            raise UsageError(
                f"the source has a registered object {name!r}, this rank has not",
                hint="register the same objects on all ranks, before the first step",
            )
        table = pending.metas[0]["table"]
        mine = {self.replicas.of(t) for t in codec.dumps(self.objects[name].save())[1]}
        theirs = {table[key][5] for key in entry["tensors"]}
        if not mine - {PLAIN} <= theirs:
            pending.missing.add(f"object/{name}")
            return
        for key in entry["tensors"]:
            self._take(pending, key, 0, None)

    @property
    def missing(self) -> set[str]:
        """Names of model tensors, and "object/<name>", that the sources do not have."""
        return self._import.missing if self._import is not None else set()

    def provided_by(self) -> dict[str, str]:
        """The class of everything that is to be filled."""
        return dict(self._import.of) if self._import is not None else {}

    def sources(self) -> dict[str, int]:
        """From which of the metas everything that is to be filled comes."""
        return dict(self._import.source) if self._import is not None else {}

    def presumed_equal(self) -> list[str]:
        """Parameters that are to be filled although nobody says that all ranks have the same."""
        of = self.provided_by()
        return [n for n, p in self.parameters() if of.get(n) == PLAIN and p.requires_grad]

    @torch.no_grad()
    def finish_import(self) -> None:
        """The landing tensors are full: take the state over. Does nothing without an import."""
        pending, self._import = self._import, None
        if pending is None:
            return
        for name, place in pending.final.items():
            if place is not pending.landing[name]:
                place.copy_(pending.landing[name])
        first = pending.metas[0]
        for name, entry in first["optimizers"].items():
            optimizer = self.optimizers[name]
            for i, parameter in enumerate(flat(optimizer)):
                at = pending.provider.get(self.replicas.of(parameter))
                if at is None:
                    continue
                found = pending.metas[at]["optimizers"][name]["entries"].get(i)
                if found is None:
                    optimizer.state.pop(parameter, None)
                else:
                    optimizer.state[parameter] = pending.tree(found)
            hyper = pending.tree(entry["groups"])
            if self.incomplete:
                hyper = hyper[: len(optimizer.param_groups)]
            set_hyper(optimizer, hyper)
        self.unseen, self.unchanged = set(), set()
        objects = {
            name: entry
            for name, entry in first["objects"].items()
            if f"object/{name}" not in pending.missing
            and name not in self.apart
            and name not in pending.missing_yet
        }
        for name in sorted(objects, key=lambda name: name != FLAGS):  # they say what is unseen
            if name not in LAST and name not in self._as_walked():
                self._load_object(name, pending.tree(objects[name]))
        self._finish_gradients(pending)

    def _as_walked(self) -> set[str]:
        """Objects that this newcomer has as its script and its walk have made them."""
        behind = self.own is not None
        if self.natural and behind:
            return {name for name in self.objects if not name.startswith("keepstep/")}
        if not self.blind:
            return set()
        return self.unseen | self.unchanged if behind else self.unseen

    def _load_object(self, name: str, tree: Any) -> None:
        """Behind a newcomer's walk, what only this rank has of an object stays."""
        item = self.objects[name]
        kept: dict[int, Tensor] = {}
        if self.own is not None and item.own:
            kept = {n: tensor.detach().clone() for n, tensor in item.own_tensors().items()}
        item.load(tree)
        item.put_own(kept)

    def _finish_gradients(self, pending: _Import) -> None:
        first = pending.metas[0]
        present = first["gradients"]
        alive: list[tuple[nn.Parameter, Tensor]] = []
        for name, parameter in self.parameters():
            kind = present.get(name, gradients.ZERO if any(present.values()) else gradients.ABSENT)
            key = f"grad/{name}"
            if kind == gradients.ALIVE and pending.keep_gradients and parameter.grad is not None:
                continue
            parameter.grad = torch.zeros_like(parameter) if kind else None
            if kind == gradients.ALIVE and key in pending.final:
                alive.append((parameter, pending.final[key]))
        for name in LAST:
            if name in first["objects"]:
                self.objects[name].load(pending.tree(first["objects"][name]))
        for parameter, gradient in alive:
            if parameter.grad is not None:  # maybe a view of a bucket
                shards.local(parameter.grad).copy_(gradient)

    def abandon_import(self) -> None:
        self._import = None


def _device(kind: str) -> torch.device:
    # The source's index is its own business: a newcomer's current device is its slot's.
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


_SAME_MODEL = "all ranks must build the same model; is its construction seeded or conditional?"


def _require_same(name: str, own: Tensor, table: Table) -> None:
    """A rank of the same class must have it, and alike."""
    if name not in table:
        raise UsageError(f"this rank has a tensor {name}, the source has not", hint=_SAME_MODEL)
    dtype, shape = table[name][:2]
    here = (codec.dtype_name(own.dtype), tuple(own.shape))
    if here != (dtype, shape):
        raise UsageError(
            f"{name} is {dtype}{list(shape)} at the source and {here[0]}{list(here[1])} here",
            hint=_SAME_MODEL,
        )


def _require_no_more(own: dict[str, Tensor], table: Table, classes: frozenset[str]) -> None:
    for name, entry in table.items():
        if name.startswith("model/") and entry[5] in classes and name not in own:
            raise UsageError(f"the source has a tensor {name}, this rank has not", hint=_SAME_MODEL)


def _require_same_groups(name: str, optimizer: Optimizer, theirs: dict[str, Any]) -> None:
    """Where ranks hold different layers, only the number of groups is the same."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if len(sizes) != len(theirs["sizes"]):
        raise UsageError(
            f"optimizer {name} has parameter groups of sizes {sizes} here and "
            f"{theirs['sizes']} at the source",
            hint="all ranks must build the same optimizer",
        )


def set_hyper(optimizer: Optimizer, hyper: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, hyper, strict=True):
        for key in [key for key in group if key != "params" and key not in values]:
            del group[key]
        group.update(values)
