"""Gradients in host memory on their way to the vault: the `Way` (early.py) of what is on a CPU.

A thread copies them, and the line reads the copy. Whether a gradient is still what was copied is
seen by its fingerprint, which the copying thread takes of what it has copied. Clipping is done here
in place of torch, bit by bit as torch does it: one walk through memory multiplies and takes the
fingerprints before and after. All of it is native code that leaves the interpreter to others. The
main thread computes meanwhile; what it does itself (clipping, and a look at the fence while the
vault is asked whether it has all) the copying thread helps with.

Memory: room for all gradients. It is not taken before they are copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, compress, pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from keepstep.worker.device import extension
from keepstep.worker.state.tensors import memory, plain
from keepstep.worker.vault.copies import aligned
from keepstep.worker.vault.lane import After
from keepstep.worker.vault.vault import Parcel, VaultLine

# Each word to another thread takes time, however little it says; but what comes last is waited for.
GATHER_BYTES_MIN = 1 << 20
GATHER_BYTES_MAX = 16 << 20

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


class HostWay:
    patient = True

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
        self._left = self._enough = 0  # bytes of this step, and those that are put at once
        self._held: list[dict[int, torch.Tensor]] = []  # until they were copied

    def close(self) -> None:
        self._copier.close()

    def turn(self) -> None:
        """A step begins, or all is sent anew: the line has read all, or is another one."""
        self._copier.forget()
        self._held.clear()
        self._leave(self._room.nbytes)

    def _leave(self, size: int) -> None:
        self._left = size
        self._enough = min(max(size // 2, GATHER_BYTES_MIN), GATHER_BYTES_MAX)

    def suits(self, part: torch.Tensor) -> bool:
        return part.is_cpu and part.nbytes > 0

    def joins(self, last: torch.Tensor, part: torch.Tensor) -> bool:
        return last.dtype is part.dtype  # whoever clips takes one type after the other

    def full(self, size: int) -> bool:
        return size >= self._enough

    def here(self, before: Any) -> Any:
        return None

    def place(self, parts: Sequence[torch.Tensor]) -> Any:
        return [(part.data_ptr(), part.stride(), plain(part)) for part in parts]

    def put(
        self, line: VaultLine, version: int, parts: dict[int, torch.Tensor], made: Any
    ) -> int | None:
        """The ticket is the copier's job."""
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
        job: int = self._copier.copy(
            [
                (part.data_ptr(), place.size, place.address)
                for part, place in zip(parts.values(), group.places, strict=True)
            ]
        )
        self._leave(self._left - group.size)
        line.put_parcel("grad", version, group.parcel, After(self._copier, job))
        return job

    def before_write(self) -> None:
        self._copier.wait(self._copier.last)
        self._held.clear()

    def multiply(
        self, groups: Sequence[Sequence[torch.Tensor]], chosen: Sequence[Sequence[bool]], by: Any
    ) -> tuple[Sequence[Fingerprint], Sequence[Fingerprint]] | None:
        pieces = _pieces(groups)
        numbers = [one for parts, which in zip(groups, chosen) for one in compress(parts, which)]
        if not _multiplies_alike(numbers, by) or not _apart(pieces, chosen):
            return None
        before, after = self._copier.multiply(pieces, chosen, float(by))
        increment_version(numbers)
        return before, after

    def look(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[Fingerprint]:
        found: list[Fingerprint] = self._copier.look(_pieces(groups))
        return found

    def seen(self, look: Fingerprint) -> Fingerprint:
        return look

    def sent(self, line: VaultLine, ticket: int) -> Fingerprint | None:
        if line.broken:
            return None
        self.before_write()
        found: Fingerprint = self._copier.found(ticket)
        return found


def _pieces(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[tuple[int, int]]]:
    return [[(part.data_ptr(), part.nbytes) for part in parts] for parts in groups]


def _multiplies_alike(numbers: Sequence[torch.Tensor], by: torch.Tensor) -> bool:
    """Native code and torch, to the last bit."""
    return (
        all(one.dtype is torch.float32 for one in numbers)
        and (by.is_cpu and by.dtype is torch.float32 and by.dim() == 0)
        and math.isfinite(by)
        and bool(extension.load().plain_floats())
    )


def _apart(pieces: list[list[tuple[int, int]]], chosen: Sequence[Sequence[bool]]) -> bool:
    """Nothing would be multiplied twice."""
    places = sorted(one for group, which in zip(pieces, chosen) for one in compress(group, which))
    return all(at + size <= other for (at, size), (other, _) in pairwise(places))
