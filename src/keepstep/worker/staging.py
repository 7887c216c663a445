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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.worker import cuda, shards
from keepstep.worker.early import SCALES_MAX
from keepstep.worker.lane import View
from keepstep.worker.state import memory
from keepstep.worker.vault import VaultLine

ALIGN = 64
LOOKS = 4096  # of one step, beside one for each unit

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}

Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class _Staged:
    numbers: Future[tuple[int, ...]] | None = None  # of the copy; None: there is none


class Staging:
    """The `Way` (early.py) of gradients on a GPU, and that of bases."""

    def __init__(
        self, device: torch.device, gradients: dict[int, int], bases: int, readers: int = 1
    ) -> None:
        """Bytes of each unit's gradient, and of the bases of a step; threads that read what was
        copied. RuntimeError: it cannot be."""
        small = 8 * SCALES_MAX
        total = sum(map(_aligned, gradients.values())) + bases + small
        self._device = device
        self._block = torch.empty(total, dtype=torch.uint8)
        _pin(self._block)
        at = 0
        self._gradients: dict[int, torch.Tensor] = {}
        for unit, size in gradients.items():
            self._gradients[unit] = self._block[at : at + size]
            at += _aligned(size)
        self._scales = self._block[at : at + small].view(SCALES_MAX, 8)
        self._bases = self._block[at + small :]
        self._taken = 0  # of the bases' room
        rows = LOOKS + len(gradients)
        self._seen = torch.empty((3, rows), dtype=torch.int64)
        _pin(self._seen)
        self._looks: list[Numbers] = []
        new_stream: Any = torch.cuda.Stream  # untyped in torch
        self._stream = new_stream(device)
        self._given: dict[int, int] = {}  # unit -> ticket of its gradient
        self._readers = ThreadPoolExecutor(readers, "keepstep-numbers")
        self._reading: list[Future[tuple[int, ...]]] = []
        self._copied: Any = None  # event of the last copy
        self._jobs: queue.Queue[tuple[Any, Callable[[], None]]] = queue.Queue()
        threading.Thread(target=self._feed, name="keepstep-staging", daemon=True).start()

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
        self._taken = 0

    def hold_back(self) -> None:
        """What the current stream does from here on comes after the copies."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def flush(self) -> None:
        """Behind the device: all was given to the line."""
        self._jobs.join()

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], job: Any) -> None:
        made = cuda.new_event()
        made.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        self._copied = copied
        self._jobs.put((copied, job))

    def _feed(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            copied, job = self._jobs.get()
            try:
                copied.synchronize()
                job()
            except Exception:  # of the device: the main thread meets it too, and can tell
                pass
            finally:
                self._jobs.task_done()

    def put_base(
        self,
        line: VaultLine,
        unit: int,
        version: int,
        parts: Sequence[View | torch.Tensor],
    ) -> bool:
        """Tensors among the parts are on the device. False: nothing was done."""
        wanted = [part for part in parts if isinstance(part, torch.Tensor)]
        size = sum(_aligned(tensor.nbytes) for tensor in wanted)
        fits = self._taken + size <= len(self._bases)
        if not fits or not all(tensor.is_contiguous() for tensor in wanted):
            return False
        views: list[View] = []
        pairs = []
        for part in parts:
            if not isinstance(part, torch.Tensor):
                views.append(part)
                continue
            target = self._bases[self._taken : self._taken + part.nbytes]
            self._taken += _aligned(part.nbytes)
            views.append(memory(target))
            if part.nbytes:
                pairs.append((target, _raw(part)))
        self._copy(pairs, lambda: line.put_base(unit, version, views))
        return True

    # ------------------------------------------------------------------ the way of gradients

    def suits(self, gradient: torch.Tensor) -> bool:
        part = shards.local(gradient)
        return part.device == self._device and part.is_contiguous() and part.nbytes > 0

    def put(self, line: VaultLine, unit: int, version: int, gradient: torch.Tensor) -> _Staged:
        part = shards.local(gradient).detach()
        target, staged = self._gradients[unit], _Staged()

        def give() -> None:
            self._given[unit] = line.put_grad(unit, version, memory(target))
            staged.numbers = self._readers.submit(_numbers_here, target.view(part.dtype))
            self._reading.append(staged.numbers)

        self._copy([(target, _raw(part))], give)
        return staged

    def put_again(self, line: VaultLine, unit: int, version: int, gradient: torch.Tensor) -> None:
        """Behind the device, and without its current stream, which may be held back."""
        target = self._gradients[unit]
        line.wait_read(self._given[unit])
        with torch.cuda.stream(self._stream):
            target.copy_(_raw(shards.local(gradient).detach()), non_blocking=True)
        self._stream.synchronize()
        line.put_grad(unit, version, memory(target))

    def before_write(self, line: VaultLine, ticket: _Staged) -> None:
        """Stream order sees to that (`hold_back`)."""

    def look(self, gradient: torch.Tensor) -> int:
        part = shards.local(gradient).detach()
        self._looks.append(numbers(part))
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
        return None if line.broken or ticket.numbers is None else ticket.numbers.result()


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def numbers(part: torch.Tensor) -> Numbers:
    words = part.reshape(-1).view(_WORDS[part.dtype.itemsize])
    low, high = torch.aminmax(words)
    return words.sum(dtype=torch.int64), low, high


def _numbers_here(copy: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers(copy))


def _pin(block: torch.Tensor) -> None:
    """Exactly this memory: torch's own pinned memory comes in powers of two."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)) != 0:
        raise RuntimeError(f"{block.nbytes} bytes of host memory could not be pinned")
