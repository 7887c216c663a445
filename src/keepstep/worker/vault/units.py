"""Units of redundancy: what is kept together, and how tensors become bytes and tensors again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from keepstep.worker.state import codec, shards
from keepstep.worker.state.tensors import dense, memory, on_cpu, plain
from keepstep.worker.vault.lane import View


@dataclass
class Unit:
    index: int
    name: str
    parameter: torch.nn.Parameter | None = None  # None: buffers, or a registered object
    optimizer: str = ""
    place: int = 0  # among the optimizer's parameters
    object: str = ""
    buffers: list[str] = field(default_factory=list)
    version: int = -1  # of the base that was sent last
    confirmed: int = -1  # of the last one that the vault acknowledged
    size: int = 0


def view(tensor: torch.Tensor) -> memoryview:
    return memory(on_cpu(shards.local(tensor)))


def same_order(like: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether the bytes of a gradient are in memory as those of a new one would be (see `fill`).
    They are, unless the user has put it there."""
    if not part.is_cpu:
        return plain(part)
    if not dense(part):
        return False
    if part.stride() == like.stride():
        return True
    return _order(part) == _order(torch.empty_like(like, device="meta"))


def _order(part: torch.Tensor) -> list[tuple[int, int]]:
    pairs = zip(part.shape, part.stride(), strict=True)
    return [(size, stride) for size, stride in pairs if size != 1]


def in_order(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The part that is here, or a copy of it."""
    part, like = shards.local(gradient).detach(), shards.local(parameter).detach()
    return part if same_order(like, part) else torch.empty_like(like).copy_(part)


def part_of(tensor: torch.Tensor) -> memoryview | torch.Tensor:
    part = shards.local(tensor)
    return view(part) if part.device.type == "cpu" else part.detach()


def views(parts: Iterable[memoryview | bytes | torch.Tensor]) -> list[memoryview | bytes]:
    return [view(part) if isinstance(part, torch.Tensor) else part for part in parts]


def described(tensor: torch.Tensor) -> bytes:
    """What makes a tensor of its bytes again."""
    part = shards.local(tensor)
    in_place = part.device.type == "cpu" and dense(part)  # see `on_cpu`
    stride = tuple(part.stride()) if in_place else _contiguous(part.shape)
    return _described(part.dtype, tuple(part.shape), stride, part.device.type, shards.spec(tensor))


@lru_cache(65536)
def _described(dtype: torch.dtype, *how: Any) -> bytes:
    return codec.dumps_inline((codec.dtype_name(dtype), *how))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride, found = 1, list[int]()
    for size in reversed(shape):
        found.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(found))


def rebuilt(data: Sequence[View], described: Any) -> torch.Tensor:
    dtype, shape, stride, device, spec = described
    part = torch.empty_strided(shape, stride, dtype=codec.dtype_named(dtype))
    _write(memory(part), data)
    if device != "cpu":
        part = part.to(torch.device(device, torch.cuda.current_device()))
    return shards.wrap(part, spec)


def fill(part: torch.Tensor, data: Sequence[View]) -> None:
    dense = on_cpu(part)
    if dense.data_ptr() == part.data_ptr():
        _write(memory(dense), data)
        return
    landing = torch.empty_like(dense)
    _write(memory(landing), data)
    part.copy_(landing)


def _write(into: memoryview, data: Sequence[View]) -> None:
    """Pieces that make up all of it."""
    start = 0
    for piece in data:
        into[start : start + len(piece)] = piece
        start += len(piece)
    if start != len(into):
        raise ValueError(f"{start} bytes for a tensor of {len(into)}")
