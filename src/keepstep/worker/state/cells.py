"""Buffers and extra state: what a module keeps besides its parameters, and who may change it when.

Theory of operation
-------------------
Such a *cell* (a buffer, or what `get_extra_state` returns) may belong to one rank (BatchNorm's
statistics) or be the same on all replicas (an average of the weights kept in buffers), and nobody
says which. What decides how it reaches a newcomer is *when* it changes:

    entry .. fence   own      published with the side state at the fence
    fence .. exit    late     it follows from the update, which the newcomer does not make: taken
                              from a replica, as of the entry of the next transaction
    exit .. entry    between  published at the fence, as it was there; the newcomer's walk makes
                              the change, once

A late cell must be the same on all replicas; the witness compares them (witness.py). A retry puts
back every cell that has ever changed from a copy made at the entry; the others are what they were
when they were first looked at.

Cells are compared by content. In host memory a small one is hashed at every look; a large one, and
one on a device, where looking waits for it, only if its version counter moved, in the first steps
and now and then later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from keepstep.worker.device import digest
from keepstep.worker.state import codec, shards
from keepstep.worker.state.tensors import dense, memory, on_cpu

HASHED_BYTES_MAX = 256 << 10  # at every look
DEEP_FIRST, DEEP_EVERY = 4, 64  # looks at the content of everything: steps


class Cell(NamedTuple):
    name: str
    get: Callable[[], Any]  # a tensor, or plain data
    set: Callable[[Any], None]
    buffer: bool


class _Seen(NamedTuple):
    version: tuple[int, int]
    content: bytes


class Cells:
    def __init__(self, models: dict[str, nn.Module]) -> None:
        self._models = models
        self._cells: list[Cell] | None = None
        self._seen: dict[str, _Seen] = {}
        self._first: dict[str, Any] = {}  # values, as of the first look
        self._entry: dict[str, Any] = {}  # values of changing ones, as of this entry
        self.changing: set[str] = set()
        self.late: set[str] = set()
        self._steps = 0

    def _all(self) -> list[Cell]:
        if self._cells is None:
            self._cells = list(_find(self._models))
        return self._cells

    # ------------------------------------------------------------------ the life of a step

    def enter(self) -> None:
        """A transaction begins: whatever changed since the last one ended is the script's doing
        between them."""
        self._steps += 1
        if not self._first:
            self._look(deep=True)
            self._first = {cell.name: _copy(cell.get()) for cell in self._all()}
        else:
            self.changing |= self._look(self._deep())
        changing = self.changing
        self._entry = {
            cell.name: _copy(cell.get()) for cell in self._all() if cell.name in changing
        }

    def fence(self) -> None:
        self.changing |= self._look(self._deep())

    def exit(self) -> None:
        changed = self._look(self._deep())
        self.changing |= changed
        self.late |= changed

    def undo(self) -> None:
        before = {**self._first, **self._entry}
        for cell in self._all():
            if cell.name in before:
                cell.set(before[cell.name])
        self._look(deep=True)

    def _deep(self) -> bool:
        return self._steps <= DEEP_FIRST or self._steps % DEEP_EVERY == 0

    def _look(self, deep: bool) -> set[str]:
        """Names of those whose content has changed since the last look."""
        changed: set[str] = set()
        for cell in self._all():
            value, seen = cell.get(), self._seen.get(cell.name)
            if value is None:
                continue
            version = (id(value), value._version) if isinstance(value, Tensor) else (0, 0)
            if seen is not None and seen.version == version and not deep and not _small(value):
                continue
            content = _content(value)
            self._seen[cell.name] = _Seen(version, content)
            if seen is not None and seen.content != content:
                changed.add(cell.name)
        return changed

    # ------------------------------------------------------------------ travelling

    def side(self) -> dict[str, Any]:
        """What is this rank's own, as it is now."""
        own = self.changing - self.late
        return {cell.name: cell.get() for cell in self._all() if cell.name in own} if own else {}

    def put(self, values: dict[str, Any]) -> None:
        """On a newcomer: its own, but for what is taken from replicas."""
        for cell in self._all():
            if cell.name in values and cell.name not in self.late:
                cell.set(values[cell.name])
        self.changing |= values.keys()

    def own(self) -> set[str]:
        """Names of those that no replica has as this rank has them."""
        return self.changing - self.late

    def forget(self) -> None:
        """All state was replaced: look at everything afresh."""
        self._seen.clear()
        self._first = {}

    def extra(self) -> dict[str, Any]:
        """Extra state, for replicas."""
        return {cell.name: cell.get() for cell in self._all() if not cell.buffer}

    def put_extra(self, values: dict[str, Any]) -> None:
        for cell in self._all():
            if cell.name in values:
                cell.set(values[cell.name])

    def export_late(self) -> list[str]:
        return sorted(self.late)

    def import_late(self, names: Iterable[str]) -> None:
        self.late |= set(names)
        self.changing |= self.late

    def buffers(self) -> set[str]:
        return {cell.name for cell in self._all() if cell.buffer}

    def tensors(self) -> list[Tensor]:
        found = (cell.get() for cell in self._all() if cell.buffer)
        return [value for value in found if value is not None]


def _find(models: dict[str, nn.Module]) -> Iterable[Cell]:
    seen: set[tuple[int, str]] = set()
    for model, root in models.items():
        for prefix, module in root.named_modules():
            where = f"model/{model}/{prefix}." if prefix else f"model/{model}/"
            for key in module._buffers:
                if (id(module), key) not in seen:
                    seen.add((id(module), key))
                    yield _buffer(where + key, module._buffers, key)
            extra: Any = type(module).get_extra_state
            if extra is not nn.Module.get_extra_state and (id(module), "") not in seen:
                seen.add((id(module), ""))
                name = where + "extra_state"
                yield Cell(name, module.get_extra_state, module.set_extra_state, False)


def _buffer(name: str, buffers: dict[str, Any], key: str) -> Cell:
    # The dictionary is kept, not the tensor: modules may assign a new one.
    def put(value: Any) -> None:
        own = buffers[key]
        if value is None:
            buffers[key] = None
        elif own is not None and own.shape == value.shape and own.dtype == value.dtype:
            with torch.no_grad():
                own.copy_(value)
        else:
            buffers[key] = value.to(own.device if own is not None else value.device, copy=True)

    return Cell(name, lambda: buffers[key], put, True)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return None if value is None else codec.loads_inline(codec.dumps_inline(value))


def _small(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return True
    return value.device.type == "cpu" and value.nbytes <= HASHED_BYTES_MAX


def _content(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return xxhash.xxh3_128_digest(codec.dumps_inline(value))
    part = shards.local(value).detach()
    if part.device.type != "cpu":
        return digest.digest(part)
    if not dense(part):
        return xxhash.xxh3_128_digest(memory(on_cpu(part)))
    if part.nbytes <= HASHED_BYTES_MAX:
        return xxhash.xxh3_128_digest(ctypes.string_at(part.data_ptr(), part.nbytes))
    return xxhash.xxh3_128_digest(memory(part))
