"""State that the script keeps and nobody has attached: models, schedulers, scalers, and what an
optimizer keeps beside its state_dict (attributes.py).

A target network that follows the trained one, a teacher that is updated now and then, a scheduler
that was not given to `attach`: the step depends on them, and a newcomer builds them anew. They are
found where the script keeps them (kept.py) and registered as if the script had done so, under the
path that leads to them. A model is registered once its tensors have changed: one that never does is
what the newcomer builds. One that is made when training has begun is registered at once: the copy
of a trained model is another one on a newcomer.

The content of small ones is looked at in every step, that of large ones now and then; of these,
every step looks at version counters and at some elements of each tensor, because `p.data.mul_(...)`
counts no version, or on a device at its place. All ranks look at the same time, newcomers too: what
only some of them find is each rank's own (witness.py).

Until one is registered, nobody carries it and nothing undoes what is done to it. So a newcomer's
warm-up, and a first call that is tried again, put back what they have changed, from a copy of all
such models up to 64 MiB; what cannot be put back is named.

They are looked at before a rank holds at the entry of a step or section, too: what the script has
done since the last one is part of the state that a newcomer copies there. What it has let go of
since then stays registered until the next one: the newcomer's script is still to come to that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from keepstep.errors import UsageError
from keepstep.worker.device import extension
from keepstep.worker.script import attributes
from keepstep.worker.script.kept import Kept
from keepstep.worker.script.roots import Roots
from keepstep.worker.state import codec, fsdp

PREFIX: Final = "script/"
OF_OPTIMIZERS: Final = PREFIX + attributes.PREFIX
FIRST, EVERY = 3, 256  # calls of a step in which they are looked for
HASHED_BYTES_MAX = 64 << 10  # of a model, in every step
SAMPLES = 8  # elements of a tensor of a larger one
COPIED_BYTES_MAX = 64 << 20  # of models that have not changed so far
PLAIN = (torch.Tensor, nn.Parameter)
NOTHING = torch.empty(0, device="cpu")

Tensors = dict[str, torch.Tensor]
Register = Callable[[str, Callable[[], Any], Callable[[Any], None], Any], None]


class _Content(NamedTuple):
    """Of a model, when it was looked at."""

    samples: bytes
    plain: bytes
    wrapped: bytes
    kinds: list[type]
    small: bool


class Unasked:
    """`knows(thing)`: it is attached or registered. `register(name, save, load, thing)` does just
    that, `unregister(name)` the opposite."""

    def __init__(
        self,
        roots: Callable[[], Roots],
        knows: Callable[[Any], bool],
        content: Callable[[torch.Tensor], bytes],
        register: Register,
        unregister: Callable[[str], None],
        optimizers: dict[str, torch.optim.Optimizer],
        tick: Callable[[], int] = int,
    ) -> None:
        self._knows, self._content = knows, content
        self._register, self._unregister = register, unregister
        self.kept = Kept(roots, self._wanted)
        self.calls: dict[str, tuple[int, int]] = {}  # by site: how many, version at the last one
        self._contents: dict[str, _Content] = {}  # of models
        self._models: set[str] = set()  # not changed so far
        self._others: dict[str, set[str]] = {}  # tensors of registered models that are attached
        self._sharded: dict[str, bool] = {}  # registered models
        self.left_out: set[str] = set()  # names of what nobody carries
        self._tick = tick
        self._leaving: dict[str, int] = {}  # registered, and no path leads to them since that tick
        self._lost: set[str] = set()  # that were registered, and no path leads to them any more
        self._optimizers = optimizers
        self._attributes: dict[str, attributes.Attribute] = {}  # of theirs, likewise
        self._count = -1  # of all of theirs
        self._looked = False
        self._put_back: Callable[[], str] | None = None
        self.names: set[str] = set()

    def export(self) -> dict[str, Any]:
        return {"calls": self.calls, "lost": sorted(self._lost)}

    def load(self, told: dict[str, Any]) -> None:
        self.calls, self._lost = told.get("calls", {}), set(told.get("lost", ()))

    def look(self, site: str, version: int) -> None:
        """At the entry of a step, before anybody is told of the state."""
        calls, last = self.calls.get(site, (0, -1))
        if version != last:  # a newcomer has been told of this very call
            calls += 1
            self.calls[site] = calls, version
        deep = calls <= FIRST or calls % EVERY == 0
        self._follow()
        if deep or not self._looked:
            self._discover(registers=deep)
        self._look(deep=deep)
        self._put_back = self._copied() if deep else None

    def look_at_models(self, *, ended: bool = False) -> None:
        """At the entry of a section, and where the script ends: it has no variables any more."""
        self._put_back = None
        if self._looked and not ended:
            self._follow()
        self._look(deep=False)

    def _follow(self) -> None:
        """Names may stand for other objects by now, and there may be new ones."""
        for path in sorted(p for p, tick in self._leaving.items() if tick != self._tick()):
            del self._leaving[path]
            self.kept.let_go([path])
            self.names.discard(PREFIX + path)
            self._unregister(PREFIX + path)
        exchanged, lost = self.kept.follow()
        for path in exchanged & self._registered():
            self._add(path)
        self._models -= lost
        self.left_out -= {PREFIX + path for path in lost}
        registered = lost & self._registered()
        self.kept.let_go(lost - registered)
        for path in registered:
            self._lost.add(path)
            self._leaving[path] = self._tick()
        if self._looked:
            made = not all(map(self._knows, self.kept.made()))
            if made or self.kept.homeless:
                self._discover(registers=False)

    def _registered(self) -> set[str]:
        return {name.removeprefix(PREFIX) for name in self.names}

    def _discover(self, *, registers: bool) -> None:
        self.kept.search()
        for path in self.kept:
            thing = self.kept.get(path)
            if thing is None or path in self._models or PREFIX + path in self.names:
                continue
            if PREFIX + path in self.left_out:
                continue
            if path in self._lost or (self._looked and self.kept.is_late(thing)):
                self._add(path)
            elif isinstance(thing, nn.Module):
                self._models.add(path)
            elif registers:
                self._add(path)
        self.look_at_attributes(deep=True)
        self._looked = True

    def leave_out(self, name: str) -> None:
        """It is unregistered."""
        self.names.discard(name)
        self.left_out.add(name)

    def _watched(self) -> Iterator[tuple[str, nn.Module]]:
        for path in sorted(self._models):
            module = self.kept.get(path)
            if module is not None:
                yield path, module

    def undo(self) -> str:
        """A transaction is rolled back. Whatever it has changed that cannot be put back."""
        if self._put_back is not None:
            return self._put_back()
        models = ((p, x) for p, x in self._watched() if _is_plain(x))
        return next((path for path, x in models if self._changed(path, x, False)), "")

    def before_warm_up(self) -> Callable[[], str]:
        """On a newcomer. Call what it returns behind the warm-up, as `undo`."""
        self._follow()
        self._discover(registers=False)
        self._look(deep=True)
        models, attributes = self._copied(), self._copied_attributes()

        def put_back() -> str:
            attributes()
            return models()

        return put_back

    def _copied(self) -> Callable[[], str]:
        """Of models as they are now, but for what others carry."""
        room, found = COPIED_BYTES_MAX, list[tuple[str, Any, Tensors | None, bytes]]()
        for path, module in self._watched():
            if not _is_plain(module):
                continue  # shards are gathered and freed by their module
            own = self._own(module)
            size = sum(tensor.nbytes for tensor in own.values())
            copy: Tensors | None = None
            if size <= room and not any(tensor.is_inference() for tensor in own.values()):
                room -= size
                copy = {key: tensor.detach().clone() for key, tensor in own.items()}
            found.append((path, weakref.ref(module), copy, _samples(own) if copy is None else b""))

        def put_back() -> str:
            left = ""
            for path, ref, copy, samples in found:
                module = ref()
                if module is None:
                    continue  # the script has let go of it
                own = self._own(module)
                if copy is None:
                    left = left or ("" if _samples(own) == samples else path)
                elif not self._same(own, copy):
                    for key in {**own, **copy}:
                        _put(module, key, copy.get(key))
                    left = left or ("" if self._same(self._own(module), copy) else path)
            return left

        return put_back

    def _same(self, one: Tensors, other: Tensors) -> bool:
        return one.keys() == other.keys() and all(
            tensor.shape == other[key].shape and self._content(tensor) == self._content(other[key])
            for key, tensor in one.items()
        )

    def _copied_attributes(self) -> Callable[[], None]:
        """Those that are small: a copy follows that has what others have registered."""
        before: dict[str, bytes] = {}
        room = COPIED_BYTES_MAX
        for path, attribute in self._attributes.items():
            size = sum(tensor.nbytes for tensor in codec.dumps(attribute.save())[1])
            if size <= room:
                room -= size
                before[path] = codec.dumps_inline(attribute.save())
        known = set(self._find_attributes())

        def put_back() -> None:
            for path, attribute in self._find_attributes().items():
                if path not in known:
                    attribute.remove()
            for path, data in before.items():
                if not self._attributes[path].encodes_as(data):
                    self._attributes[path].load(codec.loads_inline(data))

        return put_back

    def _look(self, *, deep: bool) -> None:
        for path, module in self._watched():
            if self._changed(path, module, deep):
                self._add(path)

    def look_at_attributes(self, *, deep: bool = False) -> None:
        """Before the state behind an update is told to anybody."""
        if deep or attributes.count(self._optimizers) != self._count:
            first, self._count = self._count < 0, attributes.count(self._optimizers)
            found = self._find_attributes()
            if not first:
                for path in found.keys() - self._attributes.keys():
                    found[path].late = True
            self._attributes = found | self._attributes
        for path, attribute in list(self._attributes.items()):
            if attribute.changed(self._content, deep):
                self._add_attribute(path, attribute)

    def expect(self, names: set[str]) -> None:
        """On a newcomer: what the other ranks have registered."""
        self._follow()
        wanted = {name for name in names if name.startswith(PREFIX)} - self.names
        for path in sorted(
            self.kept.rename({n.removeprefix(PREFIX) for n in wanted}, self._registered())
        ):
            self._add(path)
        for name in sorted(x for x in wanted if x.startswith(OF_OPTIMIZERS)):
            path = name.removeprefix(PREFIX)
            attribute = attributes.named(self._optimizers, path)
            if attribute is not None:
                self._add_attribute(path, attribute)

    def _find_attributes(self) -> dict[str, attributes.Attribute]:
        found = attributes.find(self._optimizers, self._knows)
        return {path: x for path, x in found.items() if PREFIX + path not in self.names}

    def _add_attribute(self, path: str, attribute: attributes.Attribute) -> None:
        self.names.add(PREFIX + path)
        self._attributes.pop(path, None)
        self._register(PREFIX + path, attribute.save, attribute.load, None)

    def _wanted(self, thing: Any) -> bool:
        if isinstance(thing, nn.Module):
            return not self._knows(thing) and bool(self._own(thing))
        known = torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler
        return isinstance(thing, known) and (self.kept.holds(thing) or not self._knows(thing))

    def _own(self, module: nn.Module) -> Tensors:
        """What nobody else carries."""
        found: Tensors = {}
        for prefix, part in module.named_modules():
            if self._knows(part):
                continue
            here = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
            for name, tensor in here:
                if _is_here(tensor) and not self._knows(tensor):
                    found[f"{prefix}.{name}" if prefix else name] = tensor
        return found

    def _changed(self, path: str, module: nn.Module, deep: bool) -> bool:
        if deep:
            fsdp.reshard(module)
        tensors = [tensor for _, tensor in _strided(module)]
        kinds = [type(tensor) for tensor in tensors]
        parts = [tensor if type(tensor) in PLAIN else NOTHING for tensor in tensors]
        versions = extension.load().sampled(tensors, parts, SAMPLES, False)
        before = self._contents.get(path)
        if before is not None and not deep:
            gathered = DTensor in before.kinds and before.kinds != kinds
            if gathered or (before.samples == versions and not before.small):
                return False
        small = (  # and nothing waits for a device
            sum(tensor.nbytes for tensor in tensors) <= HASHED_BYTES_MAX
            and all(tensor.device.type == "cpu" for tensor in tensors)
        )
        plain, wrapped = self._hash(tensors), self._hash(_wrapped(module))
        now = _Content(versions, plain, wrapped, kinds, small)
        self._contents[path] = now
        if before is not None and before.wrapped != now.wrapped:
            raise UsageError(
                f"{path} has parameters of a class of its own, which change and cannot be carried",
                hint="attach it, or convert it to plain tensors",
            )
        return before is not None and before.plain != now.plain

    def _hash(self, tensors: Iterable[torch.Tensor]) -> bytes:
        hashed = xxhash.xxh3_128()
        for tensor in tensors:
            hashed.update(self._content(tensor))
        return hashed.digest()

    def _add(self, path: str) -> None:
        name, thing = PREFIX + path, self.kept.get(path)
        self._models.discard(path)
        self._lost.discard(path)
        if not isinstance(thing, nn.Module):
            self.names.add(name)
            self._register(name, thing.state_dict, thing.load_state_dict, thing)
            return
        fsdp.reshard(thing)
        tensors = dict(_strided(thing))
        self._others[path] = tensors.keys() - self._own(thing).keys()
        self._sharded[path] = any(map(_is_shard, tensors.values()))
        if name in self.names:
            return  # it stands for another model now

        def save() -> Tensors:
            """As they are now: `p.data = ...` and assigned buffers are other memory."""
            module, others = self.kept.get(path), self._others[path]
            if module is None:
                return {}
            if self._sharded[path]:
                fsdp.reshard(module)
            return {key: x.detach() for key, x in _strided(module) if key not in others}

        def load(state: Tensors) -> None:
            for key in {**save(), **state}:
                _put(self.kept.get(path), key, state.get(key))

        self.names.add(name)
        self._register(name, save, load, thing)


def _strided(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = (*module.named_parameters(), *module.named_buffers())
    return [(name, tensor) for name, tensor in named if _is_here(tensor)]


def _is_here(tensor: torch.Tensor) -> bool:
    if type(tensor) not in PLAIN and (nn.parameter.is_lazy(tensor) or _is_wrapper(tensor)):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta


def _is_shard(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Of other tensors, without memory of its own: quantized weights, for example."""
    return (
        type(tensor) not in PLAIN
        and not _is_shard(tensor)
        and is_traceable_wrapper_subclass(tensor)
    )


def _wrapped(module: nn.Module) -> Iterator[torch.Tensor]:
    """What such tensors are made of."""
    for tensor in (*module.parameters(), *module.buffers()):
        if _is_wrapper(tensor):
            yield from _made_of(tensor)


def _made_of(tensor: Any) -> Iterator[torch.Tensor]:
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if _is_wrapper(part):
            yield from _made_of(part)
        else:
            yield part


def _is_plain(module: nn.Module) -> bool:
    return all(type(tensor) in PLAIN for _, tensor in _strided(module))


def _samples(tensors: Tensors) -> bytes:
    found = list(tensors.values())
    samples: bytes = extension.load().sampled(found, found, SAMPLES, False)
    return samples


@torch.no_grad()
def _put(module: nn.Module, key: str, value: torch.Tensor | None) -> None:
    """A buffer may have got another shape, or be none by now."""
    path, _, name = key.rpartition(".")
    owner = module.get_submodule(path)
    own = getattr(owner, name)
    if value is None:
        if name in owner._buffers:
            owner._buffers[name] = None
    elif own is not None and own.shape == value.shape and own.dtype == value.dtype:
        own.copy_(value)
    elif name in owner._buffers:
        owner._buffers[name] = value.to(own.device if own is not None else value.device, copy=True)
    else:
        own.data = value.to(own.device, copy=True)
