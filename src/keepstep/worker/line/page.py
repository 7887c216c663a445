"""Writer's half of the progress page (layout: model/page.py)."""

from __future__ import annotations

import mmap
import os
import time
import zlib

from keepstep.model.page import (
    CAPACITY_DEFAULT,
    FIELDS,
    MAGIC,
    PAGE_BYTES,
    SLOT_HEADER,
    SLOTS,
    WHERE,
    slot_of,
)

_INDEX = {name: offset // 8 for name, offset in FIELDS.items()}
_WHERE = {name: index for index, name in enumerate(WHERE)}


class Page:
    """All writes are plain stores into shared memory; only growth makes a system call."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.capacity = CAPACITY_DEFAULT
        self._sequence = [0] * SLOTS
        self._data: list[tuple[int, bytes] | None] = [None] * SLOTS
        self._map()
        self._words[_INDEX["capacity"]] = self.capacity
        self._words[_INDEX["magic"]] = MAGIC
        self._marks = 0

    def _map(self) -> None:
        size = PAGE_BYTES + SLOTS * self._slot_bytes()
        os.ftruncate(self.fd, size)
        memory = mmap.mmap(self.fd, size)
        self._words, self._memory = memoryview(memory)[:PAGE_BYTES].cast("Q"), memory

    def _slot_bytes(self) -> int:
        return self.capacity

    def set(self, name: str, value: int) -> None:
        self._words[_INDEX[name]] = value

    def get(self, name: str) -> int:
        return int(self._words[_INDEX[name]])

    def where(self, name: str) -> None:
        self._words[_INDEX["where"]] = _WHERE[name]
        self.mark()

    def mark(self) -> None:
        """Progress was made. Called from the main thread only."""
        self._marks += 1
        self._words[_INDEX["marks"]] = self._marks
        self._words[_INDEX["progress_ns"]] = time.monotonic_ns()

    def new_tick(self) -> None:
        """All ranks begin to count from here: a newcomer has made fewer marks in its life."""
        self._words[_INDEX["tick_marks"]] = self._marks

    def heartbeat(self) -> None:
        self._words[_INDEX["heartbeat_ns"]] = time.monotonic_ns()

    def publish(self, tick: int, data: bytes) -> None:
        """Keep `data` as the side state of `tick` (-1: the init record) for the own agent."""
        slot = slot_of(tick)
        self._data[slot] = (tick, data)
        if SLOT_HEADER.size + len(data) > self.capacity:
            self._grow(SLOT_HEADER.size + len(data))
        else:
            self._write(slot, tick, data)

    def held(self, tick: int) -> bytes | None:
        entry = self._data[slot_of(tick)]
        return entry[1] if entry is not None and entry[0] == tick else None

    def _write(self, slot: int, tick: int, data: bytes) -> None:
        start = PAGE_BYTES + slot * self._slot_bytes()
        body = start + SLOT_HEADER.size
        self._sequence[slot] += 2
        sequence = self._sequence[slot]
        SLOT_HEADER.pack_into(self._memory, start, sequence - 1, tick, len(data), 0)
        self._memory[body : body + len(data)] = data
        SLOT_HEADER.pack_into(self._memory, start, sequence, tick, len(data), zlib.crc32(data))

    def _grow(self, need: int) -> None:
        # A reader that meets the slots in between finds wrong checksums and asks the buddy.
        # The old mapping is left to the collector: the daemon thread may be writing to it.
        self.capacity = 1 << (need - 1).bit_length()
        self._map()
        for slot, entry in enumerate(self._data):
            if entry is not None:
                self._write(slot, *entry)
        self._words[_INDEX["capacity"]] = self.capacity
