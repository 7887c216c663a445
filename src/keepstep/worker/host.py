"""Gradients in host memory on their way to the vault: the `Way` (early.py) of what is on a CPU.

A thread copies them, and the line reads the copy. Whether a gradient is still what was copied is
seen by its fingerprint, which the copying thread takes of what it has copied; that of the copy,
multiplied, tells what clipping will have made of it. All of it is done by native code that leaves
the interpreter to others: the main thread computes meanwhile, and what it does itself (a look at
the fence, while the vault is asked whether it has all) is one read of memory.

Memory: room for all gradients. It is not taken before they are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from typing import Any, NamedTuple

import torch

from keepstep.worker import extension
from keepstep.worker.copies import aligned
from keepstep.worker.lane import After
from keepstep.worker.state import dense, memory
from keepstep.worker.vault import Parcel, VaultLine

# Each word to another thread takes time, however little it says; but what comes last is waited for.
GATHER_BYTES_MIN = 1 << 20
GATHER_BYTES_MAX = 8 << 20

GROUPS_MAX = 1024  # they are the same in every step, as a rule

Fingerprint = tuple[int, int]


class _Place(NamedTuple):
    address: int
    size: int
    view: memoryview


class _Group:
    """Those that go together, as they do in every step."""

    def __init__(self, places: list[_Place], units: Sequence[int]) -> None:
        self.places = places
        self.size = sum(place.size for place in places)
        self.parcel = Parcel({unit: [place.view] for unit, place in zip(units, places)})


@dataclass(slots=True, eq=False)
class _Copied:
    places: list[_Place]
    kinds: list[torch.dtype]
    job: int  # of the copier
    at: int = 0  # among what that has found
    scales: list[list[torch.Tensor]] = field(default_factory=list)  # of each, if there are any
    known: bool = True  # the job tells of the copies, multiplied by the scales

    @property
    def simple(self) -> bool:
        """Floats, multiplied once, and all by the same."""
        scales = {id(one): one for some in self.scales for one in some}
        kinds = {*self.kinds, *(one.dtype for one in scales.values())}
        once = all(len(one) == 1 for one in self.scales)
        return once and len(scales) == 1 and kinds == {torch.float32}


class HostWay:
    def __init__(self, gradients: dict[int, int], helpers: int = 0) -> None:
        """Bytes of each unit's gradient; threads that help whoever takes fingerprints."""
        # First, so that it ends before what it uses is dropped.
        self._copier: Any = extension.load().Copier(helpers)
        self.made_for = gradients
        ends = list(accumulate(map(aligned, gradients.values()), initial=0))
        self._room = torch.empty(ends[-1], dtype=torch.uint8)
        begin, view = self._room.data_ptr(), memory(self._room)
        self._places = {
            unit: _Place(begin + at, size, view[at : at + size])
            for at, (unit, size) in zip(ends, gradients.items(), strict=False)
        }
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._copied = 0  # bytes, in this step
        self._held: list[dict[int, torch.Tensor]] = []  # until they were copied

    def close(self) -> None:
        self._copier.close()

    def turn(self) -> None:
        """A step begins, or all is sent anew: the line has read all, or is another one."""
        self._copier.forget()
        self._held.clear()
        self._copied = 0

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
        sizes = self.made_for
        if any(sizes.get(unit) != part.nbytes for unit, part in parts.items()):
            return None  # it is not what it was at attach
        units = tuple(parts)
        group = self._groups.get(units)
        if group is None:
            if len(self._groups) == GROUPS_MAX:
                self._groups.clear()
            group = self._groups[units] = _Group([self._places[unit] for unit in units], units)
        self._held.append(parts)
        job = self._copier.copy(
            [
                (part.data_ptr(), place.size, place.address)
                for part, place in zip(parts.values(), group.places, strict=True)
            ]
        )
        self._copied += group.size
        line.put_parcel("grad", version, group.parcel, After(self._copier, job))
        return _Copied(group.places, [part.dtype for part in parts.values()], job)

    def before_write(self) -> None:
        self._copier.wait(self._copier.last)
        self._held.clear()

    def multiplied(self, what: Sequence[tuple[_Copied, Sequence[bool]]], by: torch.Tensor) -> bool:
        alike: list[_Copied] = []
        for ticket, which in what:
            if not any(which):
                continue
            ticket.scales = ticket.scales or [[] for _ in ticket.places]
            for scales in compress(ticket.scales, which):
                scales.append(by)
            ticket.known = ticket.simple
            if ticket.known:
                ticket.at = len(alike)
                alike.append(ticket)
        if alike:
            pieces = [[(place.address, place.size) for place in one.places] for one in alike]
            job = self._copier.multiply(pieces, float(by))
            for ticket in alike:
                ticket.job = job
        return True

    def look(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[Fingerprint]:
        found: list[Fingerprint] = self._copier.look(
            [[(part.data_ptr(), part.nbytes) for part in parts] for parts in groups]
        )
        return found

    def seen(self, look: Fingerprint) -> Fingerprint:
        return look

    def sent(self, line: VaultLine, ticket: _Copied) -> Fingerprint | None:
        if line.broken:
            return None
        self.before_write()
        if not ticket.known:
            return self._multiplied(ticket)
        found: list[Fingerprint] = self._copier.found(ticket.job)
        return found[ticket.at]

    def _multiplied(self, ticket: _Copied) -> Fingerprint:
        """As torch multiplies."""
        copies = [
            torch.frombuffer(place.view, dtype=kind)
            for place, kind in zip(ticket.places, ticket.kinds, strict=True)
        ]
        for at, scales in enumerate(ticket.scales):
            for scale in scales:
                copies[at] = copies[at].mul(scale)
        (found,) = self.look([copies])
        return found
