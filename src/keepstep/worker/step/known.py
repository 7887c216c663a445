"""What is attached or registered, by identity and by the memory that it lies in.

The script's variables are carried by name; what they share with a weight, a buffer or a registered
object must not be carried twice, and must lie in the same memory on a replacement.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch

from keepstep.worker.script import sharing
from keepstep.worker.script.variables import Variables
from keepstep.worker.state import codec, shards
from keepstep.worker.state.rank import RankFacts

ATTACHED: Final = "attached"  # before the name of a weight or buffer


class Known:
    def __init__(self, rank: RankFacts) -> None:
        self._rank = rank
        self._variables = Variables(self.knows, self.has_memory_of, self)
        # What is attached, by id and by the address of its memory. Both may be another's later.
        self._known: dict[int, Callable[[], Any]] = {}
        self._memory: dict[int, weakref.ref[torch.Tensor]] = {}
        self._names: dict[int, str] = {}
        self._known_at = -1

    @property
    def variables(self) -> Variables:
        """The script's, which are told from what is attached."""
        return self._variables

    def knows(self, thing: Any) -> bool:
        """It is part of what is attached or registered, or Keepstep's own."""
        if type(thing).__module__.startswith("keepstep."):
            return True
        self._know()
        found = self._known.get(id(thing))
        return found is not None and found() is thing

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """It is, or is a view of, a tensor that is attached."""
        return self._owner(tensor) is not None

    def _owner(self, value: Any) -> torch.Tensor | None:
        self._know()
        address = _address(value)
        found = self._memory.get(address) if address else None
        owner = found() if found is not None else None
        return owner if owner is not None and _address(owner) == address else None

    def lying_with(self, value: Any) -> tuple[list[Any], Any] | None:
        """What is attached, or a variable of the script, in the same memory as this tensor or
        array, and its name; None: neither. LookupError: it has no name."""
        owner = self._owner(value)
        if owner is None:
            return self._variables.lying_with(value)
        return [ATTACHED, self._names[id(owner)]], owner

    def reach(self, name: list[Any], stack: list[FrameType]) -> Any:
        """What has this name in this process. LookupError: nothing."""
        if name[0] != ATTACHED:
            return self._variables.reach(name, stack)
        return self.named(name[1])

    def name_of(self, thing: Any) -> str | None:
        """Of a module, parameter or buffer that is attached."""
        self._know()
        return self._names.get(id(thing)) if self.knows(thing) else None

    def names_by_id(self) -> dict[int, str]:
        self._know()
        there = {key for key, thing in self._known.items() if thing() is not None}
        return {key: name for key, name in self._names.items() if key in there}

    def owner_of(self, tensor: Any) -> tuple[str, Any] | None:
        """The attached tensor in whose memory it lies, behind its name."""
        owner = self._owner(tensor)
        name = self._names.get(id(owner)) if owner is not None else None
        return (name, owner) if name is not None else None

    def named(self, name: str) -> Any:
        return dict(self._named())[name]

    def _named(self) -> Iterator[tuple[str, Any]]:
        for prefix, model in self._rank.models.items():
            for name, module in model.named_modules():
                yield f"{prefix}//{name}", module
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                yield f"{prefix}/{name}", tensor

    def _know(self) -> None:
        objects, optimizers = self._rank.objects.values(), self._rank.optimizers.values()
        stamp = sum(map(id, objects)) + sum(len(one.state) for one in optimizers)
        if stamp != self._known_at:
            self._known_at = stamp
            found = self._attached()
            self._known = {id(thing): _weak(thing) for thing in found}
            tensors = [thing for thing in found if isinstance(thing, torch.Tensor)]
            self._known |= {id(thing): _weak(thing) for thing in self._saved()}
            self._memory = {_address(tensor): weakref.ref(tensor) for tensor in tensors}
            self._names = {id(thing): name for name, thing in self._named()}

    def _saved(self) -> list[torch.Tensor]:
        """Of registered objects: the script may hold them, too."""
        return [
            tensor
            for item in self._rank.objects.values()
            if not isinstance(getattr(item.save, "__self__", None), torch.nn.Module)
            for tensor in codec.dumps(item.save())[1]
        ]

    def _attached(self) -> list[Any]:
        owners = [getattr(item.save, "__self__", None) for item in self._rank.objects.values()]
        modules = [
            x for x in (*self._rank.models.values(), *owners) if isinstance(x, torch.nn.Module)
        ]
        found: list[Any] = [*owners, *self._rank.optimizers.values(), *self._rank.parameters]
        for module in modules:
            found += [*module.modules(), *module.parameters(), *module.buffers()]
        for optimizer in self._rank.optimizers.values():
            for entry in optimizer.state.values():
                found += entry.values() if isinstance(entry, dict) else [entry]
        return [thing for thing in found if thing is not None]


def _weak(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


def _address(value: Any) -> int:
    """0: it has no memory of its own."""
    place = sharing.place(shards.local(value))
    return place[0] if place is not None else 0
