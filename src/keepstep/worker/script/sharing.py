"""Tensors and arrays that lie in the same memory: a row of a bank, two halves of a table.

What is written to one of them is in the others too, so a newcomer must not have copies. The rank
tells which of its variables lie in the same memory, and where. Of those that the newcomer has
itself, by a name that never changes, one gives the memory; otherwise there is new memory for all.
Then the others are views of it, so that torch counts their changes together.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from keepstep.errors import UsageError

_ALIGNED = 16  # bytes


def place(target: Any) -> tuple[int, int] | None:
    """The address of the memory that it lies in, and where in it, in bytes; None: it has none."""
    if isinstance(target, torch.Tensor):
        address = target.untyped_storage().data_ptr()
        return (address, int(target.storage_offset()) * target.itemsize) if address else None
    if not isinstance(target, numpy.ndarray) or not target.nbytes:
        return None
    owner = target
    while isinstance(owner.base, numpy.ndarray):
        owner = owner.base
    address = int(owner.ctypes.data)
    if isinstance(owner.base, torch.Tensor):
        address = owner.base.untyped_storage().data_ptr()
    return address, int(target.ctypes.data) - address


def layout(target: Any) -> list[int]:
    """Its strides, in bytes."""
    if isinstance(target, torch.Tensor):
        return [step * target.itemsize for step in target.stride()]
    return list(target.strides)


def extent(value: Any, steps: list[int]) -> int:
    """How much memory it takes with these strides, in bytes."""
    if 0 in value.shape:
        return 0
    last = sum((n - 1) * step for n, step in zip(value.shape, steps))
    return int(last + value.itemsize)


class Memory:
    """Where views are made. `begins` is the place of `anchor` in the memory of the other process:
    theirs are told apart by their distance from it."""

    def __init__(self, anchor: Any, begins: int) -> None:
        tensor = anchor if isinstance(anchor, torch.Tensor) else torch.from_numpy(anchor)
        self._base = tensor.detach()
        self._shift = self._base.storage_offset() * self._base.itemsize - begins

    def view(self, offset: int, steps: list[int], like: Any) -> Any:
        """A view with the type and shape of `like`. ValueError: it would not lie inside."""
        array = not isinstance(like, torch.Tensor)
        tensor = torch.from_numpy(like) if array else like
        storage, size, start = self._base.untyped_storage(), tensor.itemsize, offset + self._shift
        inside = start >= 0 and start + extent(tensor, steps) <= storage.nbytes()
        if not inside or any(step < 0 or step % size for step in (start, *steps)):
            raise ValueError("it lies elsewhere")
        strides = [step // size for step in steps]
        if tensor.dtype == self._base.dtype:
            found = self._base.as_strided(tensor.shape, strides, start // size)
        else:
            found = torch.empty(0, dtype=tensor.dtype, device=self._base.device)
            found.set_(storage, start // size, tensor.shape, strides)
        return found.numpy() if array else found


def joined(
    anchor: tuple[Any, int] | None, members: dict[int, tuple[Any, int, list[int]]], label: str
) -> dict[int, Any]:
    """The members (value, place, strides) in one memory, with their values: in that of the anchor,
    with its place there, if there is one."""
    if anchor is None:
        anchor = _new(members)
    memory = Memory(*anchor)
    views: dict[int, Any] = {}
    for number, (value, offset, steps) in members.items():
        try:
            found = memory.view(offset, steps, value)
        except (ValueError, TypeError):
            raise UsageError(
                f"{label} of the rank that is replaced shares its memory with another variable in "
                "a way that cannot be repeated here",
                hint="copy it: .clone() or .copy()",
            ) from None
        once = tuple(slice(None) if step else slice(0, 1) for step in steps)  # of what is repeated
        if isinstance(found, torch.Tensor):
            found[once].copy_(value.detach()[once])
            found.requires_grad_(value.requires_grad)
        else:
            found[once] = value[once]
        views[number] = found
    return views


def _new(members: dict[int, tuple[Any, int, list[int]]]) -> tuple[torch.Tensor, int]:
    """Memory for all of them, of the kind that the first has."""
    begins = min(offset for _, offset, _ in members.values()) // _ALIGNED * _ALIGNED
    ends = max(offset + extent(x, steps) for x, offset, steps in members.values())
    first = next(iter(members.values()))[0]
    if isinstance(first, torch.Tensor):
        count = -(-(ends - begins) // first.itemsize)
        return torch.empty(count, dtype=first.dtype, device=first.device), begins
    return torch.empty(ends - begins, dtype=torch.uint8), begins
