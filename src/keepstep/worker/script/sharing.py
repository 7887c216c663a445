"""Tensors and arrays that lie in the same memory: a row of a bank, two halves of a table.

What is written to one of them is in the others too, so a newcomer must not have copies. The rank
tells which of its variables lie in the same memory, and where. Of those that the newcomer has
itself, by a name that never changes, one gives the memory (the anchor); otherwise there is new
memory for all. Then the others are views of it, so that torch counts their changes together.

Memory of the newcomer's own is written only if it differs: it may be a file that cannot be written,
and a dataset that nobody changes must not look changed.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy
import torch

from keepstep.errors import UsageError
from keepstep.worker.state.tensors import on_cpu

_ALIGNED = 16  # bytes
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def place(target: Any) -> tuple[int, int] | None:
    """The address of the memory that it lies in, and where in it, in bytes; None: it has none."""
    if isinstance(target, numpy.ndarray):
        owner = _owner(target)
        address = owner.ctypes.data
        if isinstance(owner.base, torch.Tensor):
            address = owner.base.untyped_storage().data_ptr()
        return (address, target.ctypes.data - address) if target.nbytes else None
    if type(target) not in _PLAIN or target.is_conj() or target.is_neg():
        return None
    try:
        address = target.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a layout without memory of its own
        return None
    return (address, int(target.storage_offset()) * target.itemsize) if address else None


def _owner(array: Any) -> Any:
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return array


def owned(target: Any) -> tuple[int, int] | None:
    """Address and size of the memory that an array and its views lie in, if numpy has it."""
    if not isinstance(target, numpy.ndarray):
        return None
    owner = _owner(target)
    return (owner.ctypes.data, owner.nbytes) if owner.base is None else None


def layout(target: Any) -> list[int]:
    """Its strides, in bytes."""
    if isinstance(target, torch.Tensor):
        return [step * target.itemsize for step in target.stride()]
    return list(target.strides)


class Laid(Protocol):
    """What has a place in memory: a node of a tensor or an array."""

    number: int
    target: Any
    place: tuple[int, int] | None
    laid: list[Any]


class MemoryMap:
    """Which of them lie where."""

    def __init__(self) -> None:
        self.lying: dict[int, dict[Any, None]] = {}  # by address of their memory
        self.shared: dict[int, None] = {}  # addresses with several
        self._arrays: dict[int, int] = {}  # memory of arrays: address -> size
        self._starts: list[int] = []  # their addresses, in order

    def at(self, value: Any) -> dict[Any, None]:
        """What lies in the memory of this value."""
        where = place(value)
        return self.lying.get(where[0], {}) if where is not None else {}

    def lay(self, one: Laid) -> None:
        """Where it lies, from now on."""
        self.move_out(one)
        target = one.target
        one.place = where = place(target)
        if where is None:
            return
        array = owned(target)
        if array is not None and array[0] not in self._arrays:
            bisect.insort(self._starts, array[0])
            self._arrays[array[0]] = array[1]
        elif self._starts and isinstance(target, torch.Tensor):  # over the middle of an array?
            start = self._starts[bisect.bisect_right(self._starts, where[0]) - 1]
            if start < where[0] < start + self._arrays[start]:
                one.place = where = start, where[1] + where[0] - start
        one.laid = [one.number, where[1], layout(target)]
        there = self.lying.setdefault(where[0], {})
        there[one] = None
        if len(there) > 1:
            self.shared.setdefault(where[0])

    def move_out(self, one: Laid) -> None:
        if one.place is None:
            return
        address, one.place = one.place[0], None
        there = self.lying.get(address, {})
        there.pop(one, None)
        if len(there) < 2:
            self.shared.pop(address, None)
        if not there:
            self.lying.pop(address, None)
            if self._arrays.pop(address, None) is not None:
                self._starts.remove(address)


def _reach(value: Any, steps: list[int]) -> tuple[int, int]:
    """How far before and behind its first element it takes memory, in bytes."""
    if 0 in value.shape:
        return 0, 0
    ways = [(n - 1) * step for n, step in zip(value.shape, steps)]
    before, behind = sum(w for w in ways if w < 0), sum(w for w in ways if w > 0)
    return before, behind + int(value.itemsize)


class Memory:
    """Where views are made. `begins` is the place of `anchor` in the memory of the other process:
    theirs are told apart by their distance from it. What cannot be is a ValueError."""

    def __init__(self, anchor: Any, begins: int) -> None:
        self._anchor, self._begins = anchor, begins

    def view(self, offset: int, steps: list[int], like: Any, *, array: bool = False) -> Any:
        """A view with the type and shape of `like`, for which its metadata is enough."""
        array = array or isinstance(like, numpy.ndarray)
        try:
            if array and isinstance(self._anchor, numpy.ndarray):
                return self._array(offset, steps, like)
            tensor = torch.from_numpy(like) if isinstance(like, numpy.ndarray) else like
            found = self._tensor(offset, steps, tensor)
            return found.numpy() if array else found
        except (TypeError, RuntimeError) as error:
            raise ValueError(str(error)) from None

    def _array(self, offset: int, steps: list[int], like: Any) -> Any:
        owner = _owner(self._anchor)
        start = self._anchor.ctypes.data - owner.ctypes.data + offset - self._begins
        return numpy.ndarray(like.shape, like.dtype, buffer=owner, offset=start, strides=steps)

    def _tensor(self, offset: int, steps: list[int], like: torch.Tensor) -> torch.Tensor:
        anchor = self._anchor
        base = anchor if isinstance(anchor, torch.Tensor) else torch.from_numpy(anchor)
        base = base.detach()
        storage, size = base.untyped_storage(), like.itemsize
        start = base.storage_offset() * base.itemsize + offset - self._begins
        inside = start >= 0 and start + _reach(like, steps)[1] <= storage.nbytes()
        if not inside or any(step < 0 or step % size for step in (start, *steps)):
            raise ValueError("it lies elsewhere")
        strides = [step // size for step in steps]
        if like.dtype == base.dtype:
            return base.as_strided(like.shape, strides, start // size)
        found = torch.empty(0, dtype=like.dtype, device=base.device)
        return found.set_(storage, start // size, like.shape, strides)


class Joined:
    """Values with their places and strides, in one memory: in that of the anchor, with its place
    there, if there is one."""

    def __init__(
        self,
        anchor: tuple[Any, int] | None,
        members: dict[int, tuple[Any, int, list[int]]],
        label: Callable[[int], str],
    ) -> None:
        self._label = label
        self._members = members
        self._new = anchor is None
        memory = Memory(*(anchor if anchor is not None else _new_memory(members)))
        self.views: dict[int, Any] = {}
        for number, (value, offset, steps) in members.items():
            try:
                self.views[number] = memory.view(offset, steps, value)
            except ValueError:
                raise UsageError(
                    f"{label(number)} of the rank that is replaced shares its memory with another "
                    "variable in a way that cannot be repeated here",
                    hint="copy it: .clone() or .copy()",
                ) from None

    def fill(self, carried: bool) -> None:
        """`carried`: so is the anchor, which has its value by now."""
        for number, view in self.views.items():
            value, _, steps = self._members[number]
            if self._new or not _equal(view, value):
                if not (self._new or carried):
                    raise UsageError(
                        f"{self._label(number)} of the rank that is replaced is part of a variable "
                        "that has other contents here",
                        hint="build the same data on every start of the script",
                    )
                _copy(view, value, steps)
            if isinstance(view, torch.Tensor) and value.requires_grad:
                view.requires_grad_()


def _equal(view: Any, value: Any) -> bool:
    """Bit by bit."""
    if isinstance(view, torch.Tensor):
        pair = [on_cpu(x.detach()).contiguous().view(-1) for x in (view, value)]
        return torch.equal(*(x.view(torch.uint8) for x in pair))
    return bool(view.tobytes() == value.tobytes())


def _copy(view: Any, value: Any, steps: list[int]) -> None:
    once = tuple(slice(None) if step else slice(0, 1) for step in steps)  # of what is repeated
    if isinstance(view, torch.Tensor):
        view[once].copy_(value.detach()[once])
    else:
        view[once] = value[once]


def _new_memory(members: dict[int, tuple[Any, int, list[int]]]) -> tuple[Any, int]:
    """For all of them, of the kind that the first tensor has."""
    ranges = [(offset, *_reach(x, steps)) for x, offset, steps in members.values()]
    begins = min(offset + before for offset, before, _ in ranges) // _ALIGNED * _ALIGNED
    size = max(offset + behind for offset, _, behind in ranges) - begins
    for value, _, _ in members.values():
        if isinstance(value, torch.Tensor):
            count = math.ceil(size / value.itemsize)
            return torch.empty(count, dtype=value.dtype, device=value.device), begins
    return numpy.empty(size, dtype=numpy.uint8), begins
