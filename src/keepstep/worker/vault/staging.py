"""From the memory of a GPU to the vault's line, while nobody waits: neither host nor device.

A stream of its own copies into host memory that is pinned once and used again in every step, behind
an event of the stream that made the bytes. A thread waits for each copy and gives it to the line.
Whoever overwrites what is being copied comes later in stream order: the current stream is made to
wait for the copies when the backward pass ends and before the update.

Whether a gradient is still what was copied is seen by three numbers that its device computes in
two reads and without other memory: the sum of its words, the least and the greatest. Other threads
compute the same of the copy. They do not see words that changed places; nothing that is done to
gradients in place does only that.

Memory: room for all gradients, and for the bases of one step; none of it on the device. What finds
no room is copied as before there was all this, and is waited for.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from keepstep.worker.device import cuda, extension
from keepstep.worker.state import shards
from keepstep.worker.state.tensors import plain
from keepstep.worker.vault.copies import Feeder, Room, aligned
from keepstep.worker.vault.early import SCALES_MAX
from keepstep.worker.vault.lane import View
from keepstep.worker.vault.vault import Ticket, VaultLine

LOOKS = 4096  # of one step, beside one for each unit

READ_WORDS = 1 << 19  # by one thread in a turn
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class _Staged:
    numbers: list[Future[tuple[int, int, int]]] = field(default_factory=list)  # of the copy's parts


class Staging:
    """The `Way` (early.py) of gradients on a GPU, and that of bases."""

    patient = False  # a stream goes on

    def __init__(
        self, device: torch.device, gradients: dict[int, int], bases: int, readers: int = 1
    ) -> None:
        """Bytes of each unit's gradient, and of the bases of a step; threads that read what was
        copied. RuntimeError: it cannot be."""
        small = 8 * SCALES_MAX
        room = sum(map(aligned, gradients.values()))
        room = aligned(room + room // 16)  # there may be gaps between those that go together
        self._device = device
        self._block = torch.empty(room + small + bases, dtype=torch.uint8)
        rows = LOOKS + len(gradients)
        self._seen = torch.empty((3, rows), dtype=torch.int64)
        # Memory that is given back while it is pinned cannot be pinned again.
        runtime, pinned = torch.cuda.cudart(), list[int]()  # type: ignore[no-untyped-call]
        self._unpin = weakref.finalize(self, _unpin, runtime, pinned)
        self._unpin.atexit = False  # there may be no driver any more
        for block in (self._block, self._seen):
            _pin(runtime, device, block)
            pinned.append(block.data_ptr())
        self._gradients = Room(self._block[:room])
        self._scales = self._block[room : room + small].view(SCALES_MAX, 8)
        self._bases = Room(self._block[room + small :])
        self._places: dict[int, memoryview] = {}  # unit -> copy of its gradient
        self._looks: list[Numbers] = []
        new_stream: Any = torch.cuda.Stream  # untyped in torch
        self._stream = new_stream(device)
        self._given: dict[int, Ticket] = {}  # unit -> ticket of its gradient
        self._readers = ThreadPoolExecutor(readers, "keepstep-numbers")
        self._reading: list[Future[tuple[int, int, int]]] = []
        self._copied: Any = None  # event of the last copy
        self._held: Any = None  # the last one that a stream was made to wait for, and the stream
        self._feeder = Feeder("keepstep-staging", lambda: torch.cuda.set_device(device))
        self.made_for = (device, gradients, bases, readers)

    def close(self) -> None:
        """Nobody has a view of it any more."""
        self._feeder.close()
        self._readers.shutdown()
        self._unpin()

    @property
    def bytes(self) -> int:
        return self._block.nbytes + self._seen.nbytes

    # ------------------------------------------------------------------ copies

    def turn(self) -> None:
        """A step begins, or all is sent anew: the line has read all, or is another one."""
        self._feeder.join()
        wait(self._reading)
        self._reading.clear()
        self._looks.clear()
        self._places.clear()
        self._gradients.taken = self._bases.taken = 0

    def hold_back(self) -> None:
        """What the current stream does from here on comes after the copies."""
        if self._copied is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._held != (self._copied, stream):  # a word to the device, however short, takes time
            stream.wait_event(self._copied)
            self._held = (self._copied, stream)

    def flush(self) -> None:
        """Behind the device: all was given to the line."""
        self._feeder.join()

    def _copy(
        self,
        line: VaultLine,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        job: Callable[[], object],
        made: Any,
    ) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        self._copied = copied

        def hand_on() -> None:
            try:
                copied.synchronize()  # an error of the device's: the main thread meets it, too
                sources.clear()  # they were held until here
                job()
            except BaseException:
                line.interrupt()  # nobody must think that it has all
                raise

        self._feeder.put(hand_on)

    def put_bases(
        self, line: VaultLine, version: int, bases: Mapping[int, Sequence[View | torch.Tensor]]
    ) -> list[int]:
        """Tensors among the parts are on the device. Units of which nothing was done, because they
        find no room here."""
        given: dict[int, list[View]] = {}
        targets, sources, left = [], [], []
        for unit, parts in bases.items():
            away = [part for part in parts if isinstance(part, torch.Tensor)]
            size = sum(aligned(tensor.nbytes) for tensor in away)
            if size > self._bases.left or not all(tensor.is_contiguous() for tensor in away):
                left.append(unit)
                continue
            given[unit] = []
            for part in parts:
                if not isinstance(part, torch.Tensor):
                    given[unit].append(part)
                    continue
                where = self._bases.take(part.nbytes)
                given[unit].append(self._bases.bytes[where])
                if part.nbytes:
                    targets.append(self._bases.block[where])
                    sources.append(_raw(part))
        if given:
            # Behind all that is queued: a part may have been made just now.
            put = partial(line.put_all, "base", version, given)
            self._copy(line, targets, sources, put, self.here())
        return left

    # ------------------------------------------------------------------ the way of gradients

    def suits(self, part: torch.Tensor) -> bool:
        there = part.device == self._device and part.nbytes > 0
        return there and part.is_contiguous() and plain(part)

    def joins(self, last: torch.Tensor, part: torch.Tensor) -> bool:
        gap = part.data_ptr() - last.data_ptr() - last.nbytes
        return (
            last.dtype == part.dtype
            and 0 <= gap <= part.nbytes // 16
            and last.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        )

    def full(self, size: int) -> bool:
        return False  # those of a module lie side by side

    def place(self, parts: Sequence[torch.Tensor]) -> Any:
        if len(parts) == 1:
            return self.suits(parts[0])
        return [(one.data_ptr(), one.untyped_storage().data_ptr(), plain(one)) for one in parts]

    def here(self, before: Any = None) -> Any:
        """Now, and not when it is put: the next layer's work is queued by then."""
        made = before or cuda.new_event()
        made.record(torch.cuda.current_stream(self._device))
        return made

    def put(
        self, line: VaultLine, version: int, parts: dict[int, torch.Tensor], made: Any
    ) -> _Staged | None:
        span = _span(list(parts.values()))
        if span.nbytes > self._gradients.left:
            return None
        where, staged, words = self._gradients.take(span.nbytes), _Staged(), _words(span)
        room, there = self._gradients.block[where], self._gradients.bytes[where]
        begin = span.data_ptr()
        views: dict[int, list[memoryview]] = {}
        for unit, part in parts.items():
            at = part.data_ptr() - begin
            self._places[unit] = there[at : at + part.nbytes]
            views[unit] = [self._places[unit]]
        kind = words.dtype

        def give() -> None:
            self._given.update(line.put_all("grad", version, views))
            copy = room.view(kind)
            starts = range(0, len(copy), READ_WORDS)
            pieces = (copy[start : start + READ_WORDS] for start in starts)
            staged.numbers = [self._readers.submit(_numbers_here, piece) for piece in pieces]
            self._reading += staged.numbers

        self._copy(line, [room.view(kind)], [words], give, made)
        return staged

    def put_again(self, line: VaultLine, unit: int, version: int, gradient: torch.Tensor) -> bool:
        """Behind the device, and without its current stream, which may be held back."""
        target = self._places.get(unit)
        part = shards.local(gradient)
        if target is None or not self.suits(part):
            return False
        line.wait_read(self._given[unit])
        source = _raw(part)
        with torch.cuda.stream(self._stream):
            torch.frombuffer(target, dtype=torch.uint8).copy_(source, non_blocking=True)
        self._stream.synchronize()
        line.put_grad(unit, version, target)
        return True

    def before_write(self) -> None:
        self.hold_back()

    def multiply(self, groups: object, chosen: object, by: torch.Tensor) -> None:
        return None

    def look(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[int]:
        begin = len(self._looks)
        self._looks += [numbers(_span(parts)) for parts in groups]
        return list(range(begin, len(self._looks)))

    def bring(self, scales: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """At the fence, before the device is waited for: what was looked at comes to the host, and
        copies of these numbers, which are there when the device was waited for."""
        count = min(len(self._looks), self._seen.shape[1])
        for row, column in enumerate(zip(*self._looks[:count], strict=True)):
            found = torch.stack(column).to(torch.int64)
            self._seen[row, :count].copy_(found, non_blocking=True)
        brought = []
        for place, scale in zip(self._scales[: len(scales)], scales, strict=True):
            slot = place[: scale.nbytes].view(scale.dtype)[0]
            slot.copy_(scale, non_blocking=True)
            brought.append(slot)
        return brought

    def seen(self, look: int) -> tuple[int, ...] | None:
        if look >= self._seen.shape[1]:
            return None  # unlike all that was sent
        return tuple(self._seen[:, look].tolist())

    def sent(self, line: VaultLine, ticket: _Staged) -> tuple[int, ...] | None:
        found = [part.result() for part in ticket.numbers]
        if line.broken or not found:
            return None
        total = sum(part[0] for part in found)
        wrapped = (total + (1 << 63)) % (1 << 64) - (1 << 63)  # as it does on the device
        return wrapped, min(part[1] for part in found), max(part[2] for part in found)


def _span(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """From the first to the end of the last one, in the order of their addresses."""
    first, last = parts[0].detach(), parts[-1]
    size = last.storage_offset() + last.numel() - first.storage_offset()
    return first.as_strided((size,), (1,))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _words(part: torch.Tensor) -> torch.Tensor:
    """As wide as they can be: the device and the host read these fastest."""
    begin, size = part.storage_offset() * part.itemsize, part.nbytes
    kind = next(kind for width, kind in _WORDS if not (begin % width or size % width))
    return part.detach().reshape(-1).view(kind)


def numbers(part: torch.Tensor) -> Numbers:
    words = _words(part)
    low, high = torch.aminmax(words)
    return words.sum(dtype=torch.int64), low, high


def _numbers_here(copy: torch.Tensor) -> tuple[int, int, int]:
    """In one read, in memory."""
    found: tuple[int, int, int] = extension.load().numbers(
        copy.data_ptr(), copy.numel(), copy.itemsize
    )
    return found


def _pin(runtime: Any, device: torch.device, block: torch.Tensor) -> None:
    """Exactly this memory: torch's own pinned memory comes in powers of two."""
    if int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)) == 0:
        return
    with contextlib.suppress(RuntimeError):  # the error, which it would find with whatever is next
        torch.empty(1, device=device).zero_()
    raise RuntimeError(f"{block.nbytes} bytes of host memory could not be pinned")


def _unpin(runtime: Any, addresses: list[int]) -> None:
    for address in addresses:
        runtime.cudaHostUnregister(address)
