"""Memory that the vault receives into, used again when nobody holds it any more.

What is kept has the same sizes in every step. The kernel gives fresh pages as slowly as a socket
gives bytes, so blocks of what was dropped are handed out again: never while anybody still has a
view of one, and no more of them wait here than writers have reserved and do not use.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

from keepstep.adapters.transport.blocking import landing

REUSED_BYTES_MIN = 64 << 10


class Landings:
    def __init__(self, unused: Callable[[], int]) -> None:
        """`unused`: bytes that are reserved and not held."""
        self._unused = unused
        self._lock = threading.RLock()  # a block may come back in the middle of anything
        self._free: dict[int, list[Any]] = {}  # size -> blocks
        self.waiting = 0  # bytes of them

    def take(self, size: int) -> memoryview:
        if size < REUSED_BYTES_MIN:
            return landing(size)
        with self._lock:
            block = self._pop(size) if size in self._free else None
            if block is None:
                self._keep_only(self._unused() - size)  # of other sizes, and too much with this one
        if block is None:
            block = landing(size)
        # The views that are made of it hold this, and nobody else does.
        whole = (ctypes.c_ubyte * size).from_buffer(block)
        weakref.finalize(whole, self._back, block).atexit = False
        return memoryview(whole).cast("B")

    def _back(self, block: memoryview) -> None:
        size = len(block)
        with self._lock:
            if self.waiting + size <= self._unused():
                self._free.setdefault(size, []).append(block)
                self.waiting += size

    def _pop(self, size: int) -> memoryview:
        block: memoryview = self._free[size].pop()
        if not self._free[size]:
            del self._free[size]
        self.waiting -= size
        return block

    def _keep_only(self, most: int) -> None:
        while self._free and self.waiting > max(most, 0):
            self._pop(next(iter(self._free)))

    def trim(self) -> None:
        """Writers have gone, or reserve less."""
        with self._lock:
            self._keep_only(self._unused())
