"""From the memory of a GPU to the vault's line, while nobody waits: neither host nor device.

A stream of its own copies into host memory that is pinned once and used again in every step, behind
an event of the stream that made the bytes. A thread waits for each copy and gives it to the line.
Whoever overwrites what is being copied comes later in stream order: the current stream is made to
wait for the copies when the backward pass ends and before the update.

Whether a gradient is still what was copied is told by its *fingerprint*: three numbers that its
device computes in two reads and without other memory, the sum of its words, the least and the
greatest. Other threads compute the same of the copy. It does not tell that words have changed
places; nothing that is done to gradients in place does only that.

Memory: room for all gradients, and for the bases of one step; none of it on the device. What finds
no room is copied at the fence, which waits for it.
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
from keepstep.worker.vault.lane import View
from keepstep.worker.vault.vault import Ticket, VaultLine

SCALES_MAX = 64  # numbers of one step that clipping multiplies by
FINGERPRINTS = 4096  # of one step, beside one for each unit

READ_WORDS = 1 << 19  # by one thread in a turn
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

Fingerprint = tuple[int, int, int]  # sum, least, greatest
Queued = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the same, on a device


@dataclass
class StagedCopy:
    """Of gradients that went together."""

    fingerprints: list[Future[Fingerprint]] = field(default_factory=list)  # of its pieces


class PinnedStaging:
    """Copies gradients and bases of one device, and compares gradients with their copies."""

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
        rows = FINGERPRINTS + len(gradients)
        self._found = torch.empty((3, rows), dtype=torch.int64)  # fingerprints, read back
        # Memory that is given back while it is pinned cannot be pinned again.
        runtime, pinned = torch.cuda.cudart(), list[int]()  # type: ignore[no-untyped-call]
        self._unpin = weakref.finalize(self, _unpin, runtime, pinned)
        self._unpin.atexit = False  # there may be no driver any more
        for block in (self._block, self._found):
            _pin(runtime, device, block)
            pinned.append(block.data_ptr())
        self._gradients = Room(self._block[:room])
        self._scales = self._block[room : room + small].view(SCALES_MAX, 8)
        self._bases = Room(self._block[room + small :])
        self._copies: dict[int, memoryview] = {}  # unit -> copy of its gradient
        self._queued: list[Queued] = []
        new_stream: Any = torch.cuda.Stream  # untyped in torch
        self._stream = new_stream(device)
        self._given: dict[int, Ticket] = {}  # unit -> ticket of its gradient
        self._readers = ThreadPoolExecutor(readers, "keepstep-fingerprints")
        self._reading: list[Future[Fingerprint]] = []
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
        return self._block.nbytes + self._found.nbytes

    # ------------------------------------------------------------------ copies

    def reset(self) -> None:
        """A step begins, or all is sent anew: the line has read all, or is another one. All room
        is free again."""
        self._feeder.join()
        wait(self._reading)
        self._reading.clear()
        self._queued.clear()
        self._copies.clear()
        self._gradients.taken = self._bases.taken = 0

    def make_stream_wait(self) -> None:
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
            self._copy(line, targets, sources, put, self.record_event())
        return left

    # ------------------------------------------------------------------ gradients

    def can_copy(self, part: torch.Tensor) -> bool:
        there = part.device == self._device and part.nbytes > 0
        return there and part.is_contiguous() and plain(part)

    def adjoins(self, last: torch.Tensor, part: torch.Tensor) -> bool:
        """Whether it lies so close behind the one before that they are copied as one, as those of a
        module do."""
        gap = part.data_ptr() - last.data_ptr() - last.nbytes
        return (
            last.dtype == part.dtype
            and 0 <= gap <= part.nbytes // 16
            and last.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        )

    def places(self, parts: Sequence[torch.Tensor]) -> Any:
        """Of what goes together: must be as they were when it was put, or its fingerprint is not
        to be had."""
        if len(parts) == 1:
            return self.can_copy(parts[0])
        return [(one.data_ptr(), one.untyped_storage().data_ptr(), plain(one)) for one in parts]

    def record_event(self, again: Any = None) -> Any:
        """The moment at which a gradient was just made, for `put`: when that is called the next
        layer's work is queued already. `again`: an event to be recorded once more."""
        made = again or cuda.new_event()
        made.record(torch.cuda.current_stream(self._device))
        return made

    def put(
        self, line: VaultLine, version: int, parts: dict[int, torch.Tensor], made: Any
    ) -> StagedCopy | None:
        """Gradients by unit, behind the event `made`. They may be written to as soon as
        `make_stream_wait` was called. None: there is no room."""
        span = _span(list(parts.values()))
        if span.nbytes > self._gradients.left:
            return None
        where, staged, words = self._gradients.take(span.nbytes), StagedCopy(), _words(span)
        room, there = self._gradients.block[where], self._gradients.bytes[where]
        begin = span.data_ptr()
        views: dict[int, list[memoryview]] = {}
        for unit, part in parts.items():
            at = part.data_ptr() - begin
            self._copies[unit] = there[at : at + part.nbytes]
            views[unit] = [self._copies[unit]]
        kind = words.dtype

        def give() -> None:
            self._given.update(line.put_all("grad", version, views))
            copy = room.view(kind)
            starts = range(0, len(copy), READ_WORDS)
            pieces = (copy[start : start + READ_WORDS] for start in starts)
            staged.fingerprints = [self._readers.submit(host_fingerprint, one) for one in pieces]
            self._reading += staged.fingerprints

        self._copy(line, [room.view(kind)], [words], give, made)
        return staged

    def put_again(self, line: VaultLine, unit: int, version: int, gradient: torch.Tensor) -> bool:
        """Behind the device, and without its current stream, which may be held back."""
        target = self._copies.get(unit)
        part = shards.local(gradient)
        if target is None or not self.can_copy(part):
            return False
        line.wait_read(self._given[unit])
        source = _raw(part)
        with torch.cuda.stream(self._stream):
            torch.frombuffer(target, dtype=torch.uint8).copy_(source, non_blocking=True)
        self._stream.synchronize()
        line.put_grad(unit, version, target)
        return True

    def queue_fingerprints(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[int]:
        """The device computes them, of what the gradients of each group are now. Gives their
        places for `fingerprint_at`."""
        begin = len(self._queued)
        self._queued += [fingerprint(_span(parts)) for parts in groups]
        return list(range(begin, len(self._queued)))

    def queue_readback(self, scales: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """At the fence, before the device is waited for: fingerprints come to the host, and copies
        of these numbers, which are there when the device was waited for."""
        count = min(len(self._queued), self._found.shape[1])
        for row, column in enumerate(zip(*self._queued[:count], strict=True)):
            found = torch.stack(column).to(torch.int64)
            self._found[row, :count].copy_(found, non_blocking=True)
        copies = []
        for place, scale in zip(self._scales[: len(scales)], scales, strict=True):
            slot = place[: scale.nbytes].view(scale.dtype)[0]
            slot.copy_(scale, non_blocking=True)
            copies.append(slot)
        return copies

    def fingerprint_at(self, place: int) -> tuple[int, ...] | None:
        """Behind the device. None: there was no room for so many."""
        if place >= self._found.shape[1]:
            return None
        return tuple(self._found[:, place].tolist())

    def copy_fingerprint(self, line: VaultLine, copy: StagedCopy) -> Fingerprint | None:
        """Of all of it. None: it was lost."""
        found = [piece.result() for piece in copy.fingerprints]
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


def fingerprint(part: torch.Tensor) -> Queued:
    """On the tensor's device, which is not waited for."""
    words = _words(part)
    low, high = torch.aminmax(words)
    return words.sum(dtype=torch.int64), low, high


def host_fingerprint(copy: torch.Tensor) -> Fingerprint:
    """In host memory, in one read."""
    found: Fingerprint = extension.load().numbers(copy.data_ptr(), copy.numel(), copy.itemsize)
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
