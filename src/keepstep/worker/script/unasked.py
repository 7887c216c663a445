"""State that the script keeps and nobody has attached: models, schedulers, scalers, and what an
optimizer keeps beside its state_dict (attributes.py).

A target network that follows the trained one, a teacher that is updated now and then, a scheduler
that was not given to `attach`: the step depends on them, and a newcomer builds them anew. They are
found where the script keeps them (graph.py) and registered as if the script had done so, under the
path that leads to them. A model is registered once its tensors have changed: one that never does is
what the newcomer builds. The content of small ones is looked at in every step, that of large ones
now and then; of these, every step looks at version counters and at some elements of each tensor,
because `p.data.mul_(...)` counts no version, or on a device at its place. All ranks look at the
same time, newcomers too: what only some of them find is each rank's own (witness.py).

Until one is registered, nobody carries it and nothing undoes what is done to it. So a newcomer's
warm-up, and a first call that is tried again, put back what they have changed, from a copy of all
such models up to 64 MiB; what cannot be put back is named.

They are looked at before a rank holds at the entry of a step or section, too: what the script has
done since the last one is part of the state that a newcomer copies there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import xxhash
from torch import nn

from keepstep.worker.device import extension
from keepstep.worker.script import attributes, graph
from keepstep.worker.script.roots import Roots
from keepstep.worker.state import codec

PREFIX: Final = "script/"
OF_OPTIMIZERS: Final = PREFIX + attributes.PREFIX
FIRST, EVERY = 3, 256  # calls of a step in which they are looked for
HASHED_BYTES_MAX = 64 << 10  # of a model, in every step
SAMPLES = 8  # elements of a tensor of a larger one
COPIED_BYTES_MAX = 64 << 20  # of models that have not changed so far
PLAIN = (torch.Tensor, nn.Parameter)
NOTHING = torch.empty(0, device="cpu")

Tensors = dict[str, torch.Tensor]
Register = Callable[[str, Callable[[], Any], Callable[[Any], None]], None]


class Unasked:
    """`knows(thing)`: it is attached or registered. `register(name, save, load)` does just that."""

    def __init__(
        self,
        roots: Callable[[], Roots],
        knows: Callable[[Any], bool],
        content: Callable[[torch.Tensor], bytes],
        register: Register,
        optimizers: dict[str, torch.optim.Optimizer],
    ) -> None:
        self._roots, self._knows, self._content = roots, knows, content
        self._register = register
        self.calls: dict[str, tuple[int, int]] = {}  # by site: how many, version at the last one
        self._contents: dict[str, tuple[bytes, bytes]] = {}  # samples and content of models
        self._models: dict[str, nn.Module] = {}  # not changed so far
        self._optimizers = optimizers
        self._attributes: dict[str, attributes.Attribute] = {}  # of theirs, likewise
        self._count = -1  # of all of theirs
        self._looked = False
        self._put_back: Callable[[], str] | None = None
        self.names: set[str] = set()

    def look(self, site: str, version: int) -> None:
        """At the entry of a step, before anybody is told of the state."""
        calls, last = self.calls.get(site, (0, -1))
        if version != last:  # a newcomer has been told of this very call
            calls += 1
            self.calls[site] = calls, version
        deep = calls <= FIRST or calls % EVERY == 0
        if deep or not self._looked:
            self._discover(registers=deep)
        self.look_at_models(deep=deep)
        self._put_back = self._copied() if deep else None

    def _discover(self, *, registers: bool) -> None:
        for path, thing in self._find().items():
            if isinstance(thing, nn.Module):
                self._models[path] = thing
            elif registers:
                self._add(path, thing)
        self.look_at_attributes(deep=True)
        self._looked = True

    def undo(self) -> str:
        """A transaction is rolled back. Whatever it has changed that cannot be put back."""
        if self._put_back is not None:
            return self._put_back()
        models = ((p, x) for p, x in self._models.items() if _is_plain(x))
        return next((path for path, x in models if self._changed(path, x, False)), "")

    def before_warm_up(self) -> Callable[[], str]:
        """On a newcomer. Call what it returns behind the warm-up, as `undo`."""
        self._discover(registers=False)
        self.look_at_models(deep=True)
        models, attributes = self._copied(), self._copied_attributes()

        def put_back() -> str:
            attributes()
            return models()

        return put_back

    def _copied(self) -> Callable[[], str]:
        """Of models as they are now, but for what others carry."""
        room, found = COPIED_BYTES_MAX, list[tuple[str, nn.Module, Tensors | None, bytes]]()
        for path, module in self._models.items():
            if not _is_plain(module):
                continue  # shards are gathered and freed by their module
            own = self._own(module)
            size = sum(tensor.nbytes for tensor in own.values())
            copy: Tensors | None = None
            if size <= room and not any(tensor.is_inference() for tensor in own.values()):
                room -= size
                copy = {key: tensor.detach().clone() for key, tensor in own.items()}
            found.append((path, module, copy, _samples(own) if copy is None else b""))

        def put_back() -> str:
            left = ""
            for path, module, copy, samples in found:
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

    def look_at_models(self, *, deep: bool = False) -> None:
        """Those that are known. At the entry of a section, and where the script ends."""
        self._put_back = None
        for path, module in list(self._models.items()):
            if self._changed(path, module, deep):
                del self._models[path]
                self._add(path, module)

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
        wanted = {name for name in names if name.startswith(PREFIX)} - self.names
        for path, thing in self._find().items() if wanted else ():
            if PREFIX + path in wanted:
                self._add(path, thing)
        for name in sorted(x for x in wanted if x.startswith(OF_OPTIMIZERS)):
            path = name.removeprefix(PREFIX)
            attribute = attributes.named(self._optimizers, path)
            if attribute is not None:
                self._add_attribute(path, attribute)

    def _find(self) -> dict[str, Any]:
        found = graph.find(self._roots().script, self._wanted)
        inside = {
            id(inner)
            for thing in found.values()
            if isinstance(thing, nn.Module)
            for inner in thing.modules()
            if inner is not thing
        }
        return {
            p: x for p, x in found.items() if id(x) not in inside and PREFIX + p not in self.names
        }

    def _find_attributes(self) -> dict[str, attributes.Attribute]:
        found = attributes.find(self._optimizers, self._knows)
        return {path: x for path, x in found.items() if PREFIX + path not in self.names}

    def _add_attribute(self, path: str, attribute: attributes.Attribute) -> None:
        self.names.add(PREFIX + path)
        self._attributes.pop(path, None)
        self._register(PREFIX + path, attribute.save, attribute.load)

    def _wanted(self, thing: Any) -> bool:
        if isinstance(thing, nn.Module):
            return not self._knows(thing) and bool(self._own(thing))
        known = torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler
        return isinstance(thing, known) and not self._knows(thing)

    def _own(self, module: nn.Module) -> Tensors:
        return {name: tensor for name, tensor in _strided(module) if not self._knows(tensor)}

    def _changed(self, path: str, module: nn.Module, deep: bool) -> bool:
        tensors = [tensor for _, tensor in _strided(module)]
        parts = [tensor if type(tensor) in PLAIN else NOTHING for tensor in tensors]
        versions = extension.load().sampled(tensors, parts, SAMPLES, False)
        before = self._contents.get(path)
        small = (  # and nothing waits for a device
            sum(tensor.nbytes for tensor in tensors) <= HASHED_BYTES_MAX
            and all(tensor.device.type == "cpu" for tensor in tensors)
        )
        if before is not None and before[0] == versions and not deep and not small:
            return False
        hashed = xxhash.xxh3_128()
        for tensor in tensors:
            hashed.update(self._content(tensor))
        self._contents[path] = versions, hashed.digest()
        return before is not None and before[1] != hashed.digest()

    def _add(self, path: str, thing: Any) -> None:
        name = PREFIX + path
        self.names.add(name)
        self._models.pop(path, None)
        if not isinstance(thing, nn.Module):
            self._register(name, thing.state_dict, thing.load_state_dict)
            return

        others = {key for key, _ in _strided(thing)} - self._own(thing).keys()

        def save() -> Tensors:
            """As they are now: `p.data = ...` and assigned buffers are other memory."""
            return {key: x.detach() for key, x in _strided(thing) if key not in others}

        def load(state: Tensors) -> None:
            for key in {**save(), **state}:
                _put(thing, key, state.get(key))

        self._register(name, save, load)


def _strided(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = (*module.named_parameters(), *module.named_buffers())
    return [(name, tensor) for name, tensor in named if _is_here(tensor)]


def _is_here(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not nn.parameter.is_lazy(tensor)
    )


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
