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

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from keepstep.errors import UsageError
from keepstep.worker.device.digest import digest
from keepstep.worker.state import codec, fsdp, gradients, shards
from keepstep.worker.state.shards import PLAIN, Replicas

LAST = ("keepstep/ddp",)  # objects that are loaded when gradients are there

# dtype, shape and strides, kind of device, how it is spread, class
Table = dict[str, tuple[str, tuple[int, ...], tuple[int, ...], str, Any, str]]


GRADIENT_BYTES_MAX = 256 << 20  # of gradients that travel although none is known to be used again


class Registered(Protocol):
    own: set[int]

    def save(self) -> Any: ...
    def load(self, state: Any) -> None: ...
    def own_tensors(self) -> dict[int, Tensor]: ...
    def put_own(self, values: dict[int, Tensor]) -> None: ...


@dataclass(frozen=True)
class Exported:
    """References to live tensors: valid while the rank holds still."""

    tensors: dict[str, Tensor]  # what is here of each
    meta: bytes
    classes: dict[str, str]  # name -> class
    specs: dict[str, shards.Spec | None] = field(default_factory=dict)  # how each is spread

    @property
    def bytes_total(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass
class _Import:
    metas: list[dict[str, Any]]
    on_device: bool  # bytes may arrive on a GPU
    keep_gradients: bool = False  # those that are here are this rank's own
    provider: dict[str, int] = field(default_factory=dict)  # class -> which of the metas
    missing: set[str] = field(default_factory=set)
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


def plain(tensor: Tensor) -> bool:
    """Its bytes are what it is; torch may note a sign, or a conjugate, without writing it."""
    return not tensor.is_conj() and not tensor.is_neg()


def dense(tensor: Tensor) -> bool:
    """Its bytes are one block of memory without holes, in whatever order of dimensions."""
    return plain(tensor) and (tensor.is_contiguous() or _permuted(tensor))


def _permuted(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size if size != 1 else 1
    return True


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a dense CPU tensor, writable and in place."""
    assert tensor.device.type == "cpu" and dense(tensor)
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    block: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    block.keep = tensor  # the view may be the last to know a temporary
    return memoryview(block).cast("B")


def on_cpu(tensor: Tensor) -> Tensor:
    """Itself if its bytes can be read where they are, else a dense copy."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and dense(tensor):
        return tensor
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


class StateSet:
    def __init__(
        self,
        models: dict[str, nn.Module],
        optimizers: dict[str, Optimizer],
        objects: Mapping[str, Registered],
        replicas: Replicas | None = None,
        ddp: Callable[[], Iterable[Any]] = tuple,
        outliving: Callable[[], bool] = bool,
    ) -> None:
        """`outliving`: whether gradients are known to outlive a step."""
        self.models = models
        self.optimizers = optimizers
        self.objects = objects
        self.replicas = replicas or Replicas(0, 1)
        self._ddp = ddp
        self.outliving = outliving
        self.expect: Callable[[set[str]], None] = lambda _: None  # other ranks have these objects
        # Tensors that an import leaves as they are, with gradients that are here, or None.
        self.own: frozenset[str] | None = None
        self.walking = False  # the script may still add parameter groups that the source has
        self.incomplete = False  # an import has left such groups out
        self._import: _Import | None = None

    # -- export

    def export(self) -> Exported:
        tensors, classes, meta = self._gathered()
        specs = {name: shards.spec(tensor) for name, tensor in tensors.items()}
        meta["table"] = {n: (*describe(t), specs[n], classes[n]) for n, t in tensors.items()}
        parts = {name: shards.local(tensor) for name, tensor in tensors.items()}
        return Exported(parts, codec.dumps_inline(meta), classes, specs)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors of an export and their classes, without how to put them back."""
        tensors, classes, _ = self._gathered()
        return {name: shards.local(tensor) for name, tensor in tensors.items()}, classes

    def _gathered(self) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
        self.replicas.wrapped_by_ddp(self._ddp())
        tensors = self._model_tensors()
        classes = {name: self.replicas.of(tensor) for name, tensor in tensors.items()}
        meta: dict[str, Any] = {
            "optimizers": {o: self._export_optimizer(o, tensors, classes) for o in self.optimizers},
            "objects": {name: self._export_object(name, tensors, classes) for name in self.objects},
        }
        meta["gradients"] = self._export_gradients(tensors, classes)
        return tensors, classes, meta

    def _export_gradients(
        self, tensors: dict[str, Tensor], classes: dict[str, str]
    ) -> dict[str, int]:
        """Those that are alive travel if it is known that gradients outlive a step, or where it is
        cheap: in the first steps it is not known yet."""
        kinds = {name: gradients.kind(p.grad) for name, p in self.parameters()}
        found = {
            name: (p, p.grad)
            for name, p in self.parameters()
            if p.grad is not None and kinds[name] == gradients.ALIVE and not p.grad.is_sparse
        }
        size = sum(shards.local(gradient).nbytes for _, gradient in found.values())
        for name, (parameter, gradient) in found.items():
            if self.outliving() or size <= GRADIENT_BYTES_MAX:
                tensors[f"grad/{name}"] = gradient
                classes[f"grad/{name}"] = self.replicas.of(gradient, parameter)
        return kinds

    def undescribed(self) -> dict[str, Tensor]:
        """Plain tensors of which nobody says how they are spread over the ranks."""
        self.replicas.wrapped_by_ddp(self._ddp())
        found = {n: t for n, t in self._model_tensors().items() if not self.replicas.described(t)}
        for name in self.objects:
            _, tensors = codec.dumps(self.objects[name].save())
            found |= {
                f"object/{name}/{n}": t
                for n, t in enumerate(tensors)
                if not self.replicas.described(t)
            }
        return found

    def classes(self) -> frozenset[str]:
        """Of everything this rank has."""
        self.replicas.wrapped_by_ddp(self._ddp())
        found = {self.replicas.of(tensor) for tensor in self._model_tensors().values()}
        for name in self.objects:
            found |= {self.replicas.of(t) for t in codec.dumps(self.objects[name].save())[1]}
        return frozenset(found)

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, shared ones once; sharded ones as DTensors."""
        return self._model_tensors()

    def _model_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        seen: set[Any] = set()
        for model, module in self.models.items():
            fsdp.reshard(module)
            for named in (module.named_parameters(), module.named_buffers()):
                for name, tensor in named:
                    key = _identity(shards.local(tensor))
                    if key not in seen:
                        seen.add(key)
                        tensors[f"model/{model}/{name}"] = tensor
        return tensors

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for model, module in self.models.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"model/{model}/{name}", parameter

    def _export_optimizer(
        self, name: str, tensors: dict[str, Tensor], classes: dict[str, str]
    ) -> dict[str, Any]:
        """Entry by entry: a newcomer may take those of its parameters from several sources."""
        optimizer = self.optimizers[name]
        index = {id(parameter): i for i, parameter in enumerate(flat(optimizer))}
        entries: dict[int, Any] = {}
        for parameter, entry in optimizer.state.items():
            if id(parameter) not in index:
                raise UsageError(
                    f"optimizer {name} keeps state for something that is none of its parameters",
                    hint="remove it, or carry it with ks.register(name, save, load)",
                )
            i = index[id(parameter)]
            data, found = codec.dumps(entry)
            keys = {id(v): k for k, v in entry.items()} if isinstance(entry, dict) else {}
            full = [f"optim/{name}/{i}/{keys.get(id(t), f'#{n}')}" for n, t in enumerate(found)]
            tensors |= zip(full, found, strict=True)
            classes |= {
                key: self.replicas.of(t, parameter) for key, t in zip(full, found, strict=True)
            }
            entries[i] = {"data": data, "tensors": full, "of": self.replicas.of(parameter)}
        hyper = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        data, found = codec.dumps(hyper)
        full = [f"optim/{name}/group/{n}" for n in range(len(found))]
        tensors |= zip(full, found, strict=True)
        classes |= {key: self.replicas.of(t) for key, t in zip(full, found, strict=True)}
        return {
            "entries": dict(sorted(entries.items())),
            "sizes": [len(group["params"]) for group in optimizer.param_groups],
            "names": self._group_names(optimizer),
            "groups": {"data": data, "tensors": full},
        }

    def _group_names(self, optimizer: Optimizer) -> list[list[str]]:
        names = {id(p): name for name, p in self.parameters()}
        return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]

    def _same_groups(self, name: str, theirs: dict[str, Any]) -> None:
        """A newcomer walks past `add_param_group` of an earlier epoch: it is made up for here. One
        that is still to come in its walk must find the optimizer without the group."""
        optimizer = self.optimizers[name]
        mine, wanted = self._group_names(optimizer), theirs.get("names")
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

    def _export_object(
        self, name: str, tensors: dict[str, Tensor], classes: dict[str, str]
    ) -> dict[str, Any]:
        data, found = codec.dumps(self.objects[name].save())
        full = [f"object/{name}/{n}" for n in range(len(found))]
        tensors |= zip(full, found, strict=True)
        classes |= {key: self.replicas.of(t) for key, t in zip(full, found, strict=True)}
        return {"data": data, "tensors": full}

    # -- import

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
        if name not in self.objects:
            self.expect({name})
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
        for name, entry in first["objects"].items():
            if f"object/{name}" not in pending.missing and name not in LAST:
                self._load_object(name, pending.tree(entry))
        self._finish_gradients(pending)

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

    # -- digest

    def fingerprint(self) -> dict[str, bytes]:
        """Digests of everything a replica shares, by name; of what is no tensor under "meta"."""
        exported = self.export()
        found = {
            name: digest(tensor)
            if tensor.device.type != "cpu"
            else xxhash.xxh3_128_digest(memory(on_cpu(tensor)))
            for name, tensor in exported.tensors.items()
        }
        return {**found, "meta": xxhash.xxh3_128_digest(exported.meta)}

    def digest(self) -> str:
        """sha256 over everything, for tests and demonstrations."""
        exported = self.export()
        digest = hashlib.sha256(exported.meta)
        for name in sorted(exported.tensors):
            digest.update(name.encode())
            digest.update(memory(on_cpu(exported.tensors[name])))
        return digest.hexdigest()


def flat(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _identity(tensor: Tensor) -> Any:
    if tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def describe(tensor: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...], str]:
    """dtype, shape, strides of its bytes as they travel, kind of device."""
    stride = tensor.stride() if dense(tensor) else _contiguous_stride(tensor.shape)
    name = codec.dtype_name(tensor.dtype)
    return name, tuple(tensor.shape), tuple(stride), tensor.device.type


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


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
