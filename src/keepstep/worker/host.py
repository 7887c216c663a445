"""Gradients in host memory on their way to the vault: the `Way` (early.py) of what is on a CPU.

A thread copies them, and the line reads the copy. Whether a gradient is still what was copied is
seen by its fingerprint, which the copying thread takes of what it has copied; that of the copy,
multiplied, tells what clipping will have made of it. Another thread looks at the fence. All of it
is done by native code that leaves the interpreter to others: to what the main thread does, or to
its way to the fence, it adds a few words.

Memory: room for all gradients. It is not taken before they are copied.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any, NamedTuple

import torch

from keepstep.worker import extension
from keepstep.worker.copies import Feeder, aligned
from keepstep.worker.state import dense, memory
from keepstep.worker.vault import VaultLine

# Each word to another thread takes time, however little it says; but what comes last is waited for.
GATHER_BYTES_MIN = 1 << 20
GATHER_BYTES_MAX = 4 << 20

Fingerprint = tuple[int, int]


class _Place(NamedTuple):
    address: int
    size: int
    view: memoryview


@dataclass(slots=True, eq=False)
class _Copied:
    places: list[_Place]
    kinds: list[torch.dtype]
    scales: list[list[torch.Tensor]]  # of each
    fingerprint: Fingerprint | None = None  # of the copies, multiplied by the scales

    @property
    def simple(self) -> bool:
        """Floats, multiplied once, and all by the same."""
        scales = {id(one): one for some in self.scales for one in some}
        kinds = {*self.kinds, *(one.dtype for one in scales.values())}
        once = all(len(one) == 1 for one in self.scales)
        return once and len(scales) == 1 and kinds == {torch.float32}


@dataclass(slots=True)
class _Look:
    fingerprint: Fingerprint | None = None


class HostWay:
    def __init__(self, gradients: dict[int, int]) -> None:
        """Bytes of each unit's gradient."""
        self.made_for = gradients
        ends = list(accumulate(map(aligned, gradients.values()), initial=0))
        self._room = torch.empty(ends[-1], dtype=torch.uint8)
        begin, view = self._room.data_ptr(), memory(self._room)
        self._places = {
            unit: _Place(begin + at, size, view[at : at + size])
            for at, (unit, size) in zip(ends, gradients.items(), strict=False)
        }
        self._native: Any = extension.load()
        self._feeder = Feeder("keepstep-copies")
        self._looker = Feeder("keepstep-looks")
        self._to_see: deque[tuple[_Look, Sequence[torch.Tensor]]] = deque()
        self._given = 0  # number of the last job that gives something to the line
        self._copied = 0  # bytes, in this step

    def close(self) -> None:
        self._feeder.close()
        self._looker.close()

    def turn(self) -> None:
        """A step begins, or all is sent anew: the line has read all, or is another one."""
        self._feeder.join()
        self._copied = 0

    def give(self, put: Callable[[], object]) -> None:
        """To the line, what need not be copied."""
        self._given = self._feeder.put(put)

    def flush(self) -> None:
        """All was given to the line."""
        self._feeder.join(self._given)

    def suits(self, part: torch.Tensor) -> bool:
        return part.is_cpu and dense(part) and part.numel() > 0

    def joins(self, last: torch.Tensor, part: torch.Tensor) -> bool:
        return True

    def full(self, size: int) -> bool:
        most = (self._room.nbytes - self._copied) // 2
        return size >= min(max(most, GATHER_BYTES_MIN), GATHER_BYTES_MAX)

    def here(self, before: Any) -> Any:
        return None

    def place(self, parts: Sequence[torch.Tensor]) -> Any:
        return [(part.data_ptr(), part.stride()) for part in parts]

    def put(
        self, line: VaultLine, version: int, parts: dict[int, torch.Tensor], made: Any
    ) -> _Copied | None:
        copied = _Copied(
            [self._places[unit] for unit in parts],
            [part.dtype for part in parts.values()],
            [[] for _ in parts],
        )
        pieces = [
            (part.data_ptr(), place.size, place.address)
            for part, place in zip(parts.values(), copied.places, strict=True)
        ]
        self._copied += sum(place.size for place in copied.places)
        views = {unit: [place.view] for unit, place in zip(parts, copied.places, strict=True)}

        def copy() -> None:
            found = self._native.copy(pieces)
            parts.clear()  # they were held until here
            line.put_all("grad", version, views)
            copied.fingerprint = found

        self.give(copy)
        return copied

    def before_write(self) -> None:
        self.flush()

    def multiplied(self, what: Sequence[tuple[_Copied, Sequence[bool]]], by: torch.Tensor) -> bool:
        tickets = []
        for ticket, which in what:
            for scales in compress(ticket.scales, which):
                scales.append(by)
            if any(which):
                ticket.fingerprint = None
                tickets.append(ticket)
        self._feeder.put(lambda: self._multiply(tickets, by))
        return True

    def _multiply(self, tickets: Sequence[_Copied], by: torch.Tensor) -> None:
        """Without taking memory, if that can be."""
        alike = [ticket for ticket in tickets if ticket.simple]
        pieces = [[(place.address, place.size) for place in one.places] for one in alike]
        found = self._native.fingerprints_multiplied(pieces, float(by)) if alike else []
        for ticket, fingerprint in zip(alike, found, strict=True):
            ticket.fingerprint = fingerprint
        for ticket in tickets:
            if ticket in alike:
                continue
            copies = [
                torch.frombuffer(place.view, dtype=kind)
                for place, kind in zip(ticket.places, ticket.kinds, strict=True)
            ]
            for at, scales in enumerate(ticket.scales):
                for scale in scales:
                    copies[at] = copies[at].mul(scale)
            (ticket.fingerprint,) = self._fingerprints([copies])

    def look(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[_Look]:
        looks = [_Look() for _ in groups]
        self._to_see.extend(zip(looks, groups, strict=True))
        self._looker.put(self._see)
        return looks

    def _see(self) -> None:
        with contextlib.suppress(IndexError):  # the other one has it
            while self._to_see:
                look, parts = self._to_see.popleft()
                (look.fingerprint,) = self._fingerprints([parts])

    def seen(self, look: _Look) -> Fingerprint | None:
        self._see()  # who waits can as well help
        self._looker.join()
        return look.fingerprint

    def _fingerprints(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[Fingerprint]:
        found: list[Fingerprint] = self._native.fingerprints(
            [[(part.data_ptr(), part.nbytes) for part in parts] for parts in groups]
        )
        return found

    def sent(self, line: VaultLine, ticket: _Copied) -> Fingerprint | None:
        self._feeder.join()
        return None if line.broken else ticket.fingerprint
