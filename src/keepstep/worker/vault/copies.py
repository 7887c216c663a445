"""Copies on their way to the vault: the memory that they lie in, and the thread that hands them on.

What is copied may be written to meanwhile, or right afterwards; a copy is not, until the step is
over and the line has read it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import torch

from keepstep.worker.state.tensors import memory

ALIGN = 64


class Room:
    """Memory that is given out from its beginning, until a step begins."""

    def __init__(self, block: torch.Tensor) -> None:
        self.block = block
        self.bytes = memory(block)
        self.taken = 0

    @property
    def left(self) -> int:
        return len(self.block) - self.taken

    def take(self, size: int) -> slice:
        begin = self.taken
        self.taken += aligned(size)
        return slice(begin, begin + size)


class Feeder:
    """Does what it is told, in this order and in a thread of its own."""

    def __init__(self, name: str, begin: Callable[[], object] = lambda: None) -> None:
        self._turn = threading.Condition()
        self._jobs: deque[Callable[[], object]] = deque()
        self._told = self._done = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(begin,), name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], object]) -> None:
        """It must see for itself that others find out when it fails; what it holds, nobody holds
        when it is over."""
        with self._turn:
            self._jobs.append(job)
            self._told += 1
            self._turn.notify_all()

    def join(self) -> None:
        """Until all was done that it was told."""
        with self._turn:
            last = self._told
            self._turn.wait_for(lambda: self._done >= last)

    def close(self) -> None:
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self._thread.join()

    def _run(self, begin: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            begin()
        while self._next():
            with contextlib.suppress(Exception):
                self._jobs[0]()
            with self._turn:
                self._jobs.popleft()
                self._done += 1
                self._turn.notify_all()

    def _next(self) -> bool:
        with self._turn:
            self._turn.wait_for(lambda: self._jobs or self._closed)
            return bool(self._jobs)


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
