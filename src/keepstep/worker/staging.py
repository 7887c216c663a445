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

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from keepstep.worker import cuda, extension, shards
from keepstep.worker.early import SCALES_MAX
from keepstep.worker.lane import View
from keepstep.worker.state import memory
from keepstep.worker.vault import Ticket, VaultLine

ALIGN = 64
LOOKS = 4096  # of one step, beside one for each unit

READ_WORDS = 1 << 19  # by one thread in a turn
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Room:
    """Memory that is given out from its beginning, until a step begins."""

    def __init__(self, block: torch.Tensor) -> None:
        self._block = block
        self._bytes = memory(block)
        self.taken = 0

    @property
    def left(self) -> int:
        return len(self._block) - self.taken

    def take(self, size: int) -> tuple[torch.Tensor, memoryview]:
        begin, end = self.taken, self.taken + size
        self.taken += _aligned(size)
        return self._block[begin:end], self._bytes[begin:end]


@dataclass
class _Staged:
    numbers: list[Future[tuple[int, int, int]]] = field(default_factory=list)  # of the copy's parts


class Staging:
    """The `Way` (early.py) of gradients on a GPU, and that of bases."""

    def __init__(
        self, device: torch.device, gradients: dict[int, int], bases: int, readers: int = 1
    ) -> None:
        """Bytes of each unit's gradient, and of the bases of a step; threads that read what was
        copied. RuntimeError: it cannot be."""
        small = 8 * SCALES_MAX
        room = sum(map(_aligned, gradients.values()))
        room = _aligned(room + room // 16)  # there may be gaps between those that go together
        self._device = device
        self._block = torch.empty(room + small + bases, dtype=torch.uint8)
        _pin(self._block)
        self._gradients = _Room(self._block[:room])
        self._scales = self._block[room : room + small].view(SCALES_MAX, 8)
        self._bases = _Room(self._block[room + small :])
        self._places: dict[int, memoryview] = {}  # unit -> copy of its gradient
        rows = LOOKS + len(gradients)
        self._seen = torch.empty((3, rows), dtype=torch.int64)
        _pin(self._seen)
        self._looks: list[Numbers] = []
        new_stream: Any = torch.cuda.Stream  # untyped in torch
        self._stream = new_stream(device)
        self._given: dict[int, Ticket] = {}  # unit -> ticket of its gradient
        self._readers = ThreadPoolExecutor(readers, "keepstep-numbers")
        self._reading: list[Future[tuple[int, int, int]]] = []
        self._copied: Any = None  # event of the last copy
        self._held: Any = None  # the last one that a stream was made to wait for, and the stream
        self._jobs: queue.Queue[tuple[Any, Callable[[], object], object] | None] = queue.Queue()
        self._feeder = threading.Thread(target=self._feed, name="keepstep-staging", daemon=True)
        self._feeder.start()
        self.made_for = (device, gradients, bases, readers)

    def close(self) -> None:
        """Nobody has a view of it any more."""
        self._jobs.put(None)
        self._feeder.join()
        self._readers.shutdown()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for block in (self._block, self._seen):
            runtime.cudaHostUnregister(block.data_ptr())

    @property
    def bytes(self) -> int:
        return self._block.nbytes + self._seen.nbytes

    # ------------------------------------------------------------------ copies

    def turn(self) -> None:
        """A step begins, or all is sent anew: the line has read all, or is another one."""
        self._jobs.join()
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
        self._jobs.join()

    def _copy(
        self, targets: list[torch.Tensor], sources: list[torch.Tensor], job: Any, made: Any
    ) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        self._copied = copied
        self._jobs.put((copied, job, sources))  # which nobody else may hold

    def _feed(self) -> None:
        torch.cuda.set_device(self._device)
        while self._fed(self._jobs.get()):
            pass

    def _fed(self, item: tuple[Any, Callable[[], object], object] | None) -> bool:
        try:
            if item is not None:
                item[0].synchronize()
                item[1]()
        except Exception:  # of the device: the main thread meets it too, and can tell
            pass
        finally:
            self._jobs.task_done()
        return item is not None

    def put_bases(
        self, line: VaultLine, version: int, bases: Mapping[int, Sequence[View | torch.Tensor]]
    ) -> list[int]:
        """Tensors among the parts are on the device. Units of which nothing was done, because they
        find no room here."""
        given: dict[int, list[View]] = {}
        targets, sources, left = [], [], []
        for unit, parts in bases.items():
            away = [part for part in parts if isinstance(part, torch.Tensor)]
            size = sum(_aligned(tensor.nbytes) for tensor in away)
            if size > self._bases.left or not all(tensor.is_contiguous() for tensor in away):
                left.append(unit)
                continue
            given[unit] = []
            for part in parts:
                if not isinstance(part, torch.Tensor):
                    given[unit].append(part)
                    continue
                target, there = self._bases.take(part.nbytes)
                given[unit].append(there)
                if part.nbytes:
                    targets.append(target)
                    sources.append(_raw(part))
        if given:
            # Behind all that is queued: a part may have been made just now.
            self._copy(targets, sources, lambda: line.put_all("base", version, given), self.here())
        return left

    # ------------------------------------------------------------------ the way of gradients

    gathers = True

    def suits(self, gradient: torch.Tensor) -> bool:
        part = shards.local(gradient)
        return part.device == self._device and part.is_contiguous() and part.nbytes > 0

    def joins(self, last: torch.Tensor, gradient: torch.Tensor) -> bool:
        one, other = shards.local(last), shards.local(gradient)
        gap = other.data_ptr() - one.data_ptr() - one.nbytes
        return (
            one.dtype == other.dtype
            and 0 <= gap <= other.nbytes // 16
            and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        )

    def here(self, before: Any = None) -> Any:
        """Now, and not when it is put: the next layer's work is queued by then."""
        made = before or cuda.new_event()
        made.record(torch.cuda.current_stream(self._device))
        return made

    def put(
        self, line: VaultLine, version: int, gradients: dict[int, torch.Tensor], made: Any
    ) -> _Staged | None:
        parts = {unit: shards.local(one) for unit, one in gradients.items()}
        span = _span(list(parts.values()))
        if span.nbytes > self._gradients.left:
            return None
        (room, there), staged, words = self._gradients.take(span.nbytes), _Staged(), _words(span)
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

        self._copy([room.view(kind)], [words], give, made)
        return staged

    def put_again(self, line: VaultLine, unit: int, version: int, gradient: torch.Tensor) -> bool:
        """Behind the device, and without its current stream, which may be held back."""
        target = self._places.get(unit)
        if target is None or not self.suits(gradient):
            return False
        line.wait_read(self._given[unit])
        source = _raw(shards.local(gradient))
        with torch.cuda.stream(self._stream):
            torch.frombuffer(target, dtype=torch.uint8).copy_(source, non_blocking=True)
        self._stream.synchronize()
        line.put_grad(unit, version, target)
        return True

    def before_write(self, line: VaultLine, ticket: _Staged) -> None:
        self.hold_back()

    def look(self, ticket: _Staged, gradients: list[torch.Tensor]) -> int:
        self._looks.append(numbers(_span([shards.local(one) for one in gradients])))
        return len(self._looks) - 1

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


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _span(parts: list[torch.Tensor]) -> torch.Tensor:
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


def _pin(block: torch.Tensor) -> None:
    """Exactly this memory: torch's own pinned memory comes in powers of two."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)) != 0:
        raise RuntimeError(f"{block.nbytes} bytes of host memory could not be pinned")
