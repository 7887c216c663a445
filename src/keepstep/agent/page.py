"""Reading a worker's progress page (layout: keepstep.model.page).

The agent preads and never maps: a worker that truncates its page gives a short read here, where
a mapping would give the agent a SIGBUS. The page is an open file of the agent, so it can still
be read after its worker was killed, until the agent closes it.
"""

from __future__ import annotations

import os
import struct
import zlib

from keepstep.model.page import (
    CAPACITY_DEFAULT,
    FIELDS,
    MAGIC,
    NEWEST,
    PAGE_BYTES,
    SLOT_HEADER,
    SLOTS,
    WHERE,
    Sample,
)

_U64 = struct.Struct("<Q")
_HEADER_BYTES = max(FIELDS.values()) + _U64.size
_ATTEMPTS = 20  # to catch a live worker between two writes of one slot
_CAPACITY_MAX = 1 << 34


def create_page(name: str) -> int:
    """A new page, all zero, as a file descriptor that children do not inherit by default."""
    fd = os.memfd_create(f"keepstep-{name}")
    os.ftruncate(fd, PAGE_BYTES + SLOTS * CAPACITY_DEFAULT)
    return fd


class PageReader:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def open(self) -> bool:
        return self._fd >= 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def sample(self) -> Sample | None:
        """None while the worker has not initialised its page, or after close."""
        fields = self._fields()
        if fields is None:
            return None
        where = fields["where"]
        return Sample(
            heartbeat_ns=fields["heartbeat_ns"],
            progress_ns=fields["progress_ns"],
            marks=fields["marks"],
            version=fields["version"],
            tick=fields["tick"],
            generation=fields["generation"],
            where=WHERE[where] if where < len(WHERE) else "",
            stepping=fields["stepping"] == 1,
            commit_ns=fields["commit_ns"],
            step_ns=fields["step_ns"],
            hold=fields["hold"] == 1,
            tick_marks=fields["tick_marks"],
            asked_ns=fields["asked_ns"],
            own_ns=fields["own_ns"],
            own_steps=fields["own_steps"],
        )

    def ticks(self) -> list[int]:
        """Ticks whose side state can be read now, the init record's included."""
        return sorted(tick for tick, _ in self._slots())

    def blob(self, tick: int) -> tuple[int, bytes] | None:
        """Side state of `tick` (NEWEST: of the highest one), with its tick."""
        slots = self._slots()
        if tick == NEWEST:
            return max((slot for slot in slots if slot[0] >= 0), default=None)
        return next((slot for slot in slots if slot[0] == tick), None)

    def _fields(self) -> dict[str, int] | None:
        raw = self._read(0, _HEADER_BYTES)
        if len(raw) < _HEADER_BYTES:
            return None
        fields = {name: _U64.unpack_from(raw, offset)[0] for name, offset in FIELDS.items()}
        return fields if fields["magic"] == MAGIC else None

    def _slots(self) -> list[tuple[int, bytes]]:
        for _ in range(_ATTEMPTS):
            fields = self._fields()
            capacity = fields["capacity"] if fields is not None else 0
            if not SLOT_HEADER.size <= capacity <= _CAPACITY_MAX:
                return []
            found = [self._slot(index, capacity) for index in range(SLOTS)]
            again = self._fields()
            # The slots move when the worker enlarges its page; what was read in between is void.
            if again is not None and again["capacity"] == capacity:
                return [slot for slot in found if slot is not None]
        return []

    def _slot(self, index: int, capacity: int) -> tuple[int, bytes] | None:
        at = PAGE_BYTES + index * capacity
        for _ in range(_ATTEMPTS):
            header = self._read(at, SLOT_HEADER.size)
            if len(header) < SLOT_HEADER.size:
                return None
            seq, tick, length, crc = SLOT_HEADER.unpack(header)
            # seq 0: never written. An all-zero slot would pass every other check below.
            if seq == 0:
                return None
            if seq % 2 == 1 or length > capacity - SLOT_HEADER.size:
                continue
            data = self._read(at + SLOT_HEADER.size, length)
            if self._read(at, SLOT_HEADER.size) != header:
                continue
            if len(data) != length or zlib.crc32(data) != crc:
                return None
            return tick, data
        return None

    def _read(self, offset: int, length: int) -> bytes:
        if self._fd < 0:
            return b""
        return os.pread(self._fd, length, offset)
