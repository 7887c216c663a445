"""The vault: state of ranks that have no replica on another node, in this agent's memory.

A rank that is lost leaves its tensors nowhere, unless it has kept them here: of every unit (a
parameter with its optimizer state) a *base*, the tensors of some version, and a *log*, the
gradient of each step since then. Its successor fetches both and applies the gradients again.

What is held. A base counts only when it is complete, and units have bases of different versions.
A newer base does not drive out the older one and the log before it at once. The rank passes the
fence of step j - 1, becomes version j and sends that base while others may still wait in that
fence; if it dies now, they go back to version j - 1. Only what the rank says at a later fence
(VaultSync) settles that nobody will: then the newest base that is old enough for everyone stays,
with the log from there on. So for a while a unit is here twice, and the reservation must have room.
Of slices, which come over different connections, the newest base is one that all of them have.
Notes (what an update needs besides gradients) go with the last base that needs them.

Who may write. The writer with the greatest (generation, serial) owns the shelf of its rank. What
an earlier one sends late is refused, also in the middle of a put. The content stays with a rank
whose process is gone, for that is when it is needed; it ends with VaultForget or with the agent.
But of an earlier writer who was ahead of all others, and alone, a later one must not inherit bases:
the step that led there is made again.

How much. A writer reserves memory first. Nothing is received beyond it, and no more is promised to
all writers together than the machine has.

Nothing here waits or reads: keepstep.agent.vault serves the connections.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from keepstep.model.vault import (
    SLICES,
    Reason,
    VaultFetched,
    VaultOpen,
    VaultPut,
    VaultRefused,
    VaultUnit,
)


class Refusal(Exception):
    def __init__(self, reason: Reason, error: str, hint: str = "") -> None:
        super().__init__(error)
        self.reply = VaultRefused(reason=reason, error=error, hint=hint)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """One tensor, gradient or note."""

    data: memoryview
    digest: bytes


Pieces = tuple[StoredPiece, ...]  # of one put; () is a gradient that is absent

MORE_MEMORY = (
    "take nodes with more memory, or a layout with replicas (HSDP); with --redundancy off a rank "
    "that is lost means going back to a checkpoint"
)


def mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def size_of(pieces: Pieces) -> int:
    return sum(len(piece.data) for piece in pieces)


@dataclass(slots=True)
class StoredUnit:
    bases: dict[int, Pieces] = field(default_factory=dict)
    log: dict[int, Pieces] = field(default_factory=dict)

    def reach(self, base: int) -> int:
        """The newest version that `base` can be brought to."""
        while base in self.log:
            base += 1
        return base

    def reaches(self) -> int:
        return max(map(self.reach, self.bases), default=-1)

    def fit(self, version: int) -> set[int]:
        """Bases that can be brought to it."""
        return {one for one in self.bases if one <= version <= self.reach(one)}

    def lack(self, version: int) -> str:
        old = [base for base in self.bases if base <= version]
        if old:
            last = self.reach(max(old)) - 1
            has = f"gradients up to {last}" if last >= max(old) else "no gradients"
            return f"has base {max(old)} and {has}, not {version - 1}"
        if self.bases:
            return f"has base {min(self.bases)}, which is newer"
        return "has no base"


@dataclass(eq=False)
class Shelf:
    """What is held of one rank, in the hands of one writer."""

    rank: int
    fence: tuple[int, int]
    layout: bytes
    reserved: int
    units: dict[int, StoredUnit]
    notes: dict[int, Pieces] = field(default_factory=dict)
    held: int = 0
    incoming: int = 0  # bytes of puts that are being received
    replaced: set[int] = field(default_factory=set)  # units that may have what nobody needs
    own: bool = False

    def slices(self, number: int) -> list[StoredUnit]:
        """All of the unit that it is one of."""
        found, number = list[StoredUnit](), number % SLICES
        while number in self.units:
            found.append(self.units[number])
            number += SLICES
        return found

    def put(self, into: dict[int, Pieces], version: int, pieces: Pieces) -> None:
        self.held += size_of(pieces) - size_of(into.get(version, ()))
        into[version] = pieces

    def drop(self, out_of: dict[int, Pieces], versions: Iterable[int]) -> None:
        for version in list(versions):
            self.held -= size_of(out_of.pop(version))


class VaultStore:
    def __init__(self) -> None:
        self._shelves: dict[int, Shelf] = {}
        self._fences: dict[int, tuple[int, int]] = {}  # outlives what was forgotten

    def open(self, ask: VaultOpen, available: int) -> Shelf:
        """`available`: bytes of memory that the machine could still give."""
        rank, fence = ask.rank, (ask.generation, ask.serial)
        seen = self._fences.get(rank, fence)
        if fence < seen:
            raise Refusal(
                "fenced",
                f"the vault of rank {rank} belongs to a writer of generation {seen[0]}, "
                f"a later one than that of generation {ask.generation}",
            )
        old = self._shelves.get(rank)
        kept = old if old is not None and not ask.fresh else None
        if kept is not None and (kept.layout, set(kept.units)) != (ask.layout, set(ask.units)):
            raise Refusal(
                "layout",
                f"the vault holds other units of rank {rank} than this writer has",
                "open it as fresh, and send every base",
            )
        self._afford(ask, kept, old, available)
        self._fences[rank] = fence
        if kept is not None and seen == fence:
            kept.reserved = ask.reserve  # one more stream of the same writer
            return kept
        if kept is not None:
            # A shelf of its own: what an earlier writer still holds in its hands is not this one.
            shelf = dataclasses.replace(
                kept, fence=fence, reserved=ask.reserve, incoming=0, own=ask.own
            )
            if (version := ask.version) is not None:
                for unit in shelf.units.values():
                    shelf.drop(unit.bases, [one for one in unit.bases if one > version])
        else:
            units = {unit: StoredUnit() for unit in ask.units}
            shelf = Shelf(rank, fence, ask.layout, ask.reserve, units, own=ask.own)
        self._shelves[rank] = shelf
        return shelf

    def _afford(
        self, ask: VaultOpen, kept: Shelf | None, old: Shelf | None, available: int
    ) -> None:
        others = [shelf for shelf in self._shelves.values() if shelf is not old]
        promised = _promised(others)
        freed = old.held if old is not None and kept is None else 0
        needed = ask.reserve - (kept.held if kept is not None else 0)
        left = available + freed - promised
        if needed > left:
            raise Refusal(
                "memory",
                f"the shards of rank {ask.rank}, which no other rank has, take {mib(needed)} of "
                f"host memory where they are kept, and {mib(max(left, 0))} are left there",
                MORE_MEMORY,
            )

    def promised(self) -> int:
        return _promised(list(self._shelves.values()))  # asked from any thread

    def reaches(self, shelf: Shelf) -> int:
        return min((unit.reaches() for unit in shelf.units.values()), default=-1)

    def _own(self, shelf: Shelf) -> None:
        if self._shelves.get(shelf.rank) is not shelf:
            raise Refusal(
                "fenced",
                f"a later writer has opened the vault of rank {shelf.rank}, or it was forgotten; "
                f"this one is of generation {shelf.fence[0]}",
            )

    def admit(self, shelf: Shelf, put: VaultPut) -> None:
        """Before its bytes are received; `done` comes after it, whatever happens between."""
        self._own(shelf)
        if put.kind != "note" and put.unit not in shelf.units:
            raise Refusal("layout", f"rank {shelf.rank} has no unit {put.unit}")
        size, taken = sum(put.sizes), shelf.held + shelf.incoming
        if taken + size > shelf.reserved:
            raise Refusal(
                "memory",
                f"{size} bytes more for rank {shelf.rank} are over its reservation: "
                f"{taken} of {shelf.reserved} bytes are taken",
                "reserve more, or send bases more often to keep the log short",
            )
        shelf.incoming += size

    def done(self, shelf: Shelf, put: VaultPut) -> None:
        shelf.incoming -= sum(put.sizes)

    def keep(self, shelf: Shelf, put: VaultPut, pieces: Pieces) -> None:
        self._own(shelf)
        if put.kind == "note":
            shelf.put(shelf.notes, put.version, pieces)
        elif put.kind == "base":
            shelf.put(shelf.units[put.unit].bases, put.version, pieces)
            shelf.replaced.add(put.unit)
        else:
            shelf.put(shelf.units[put.unit].log, put.version, pieces)

    def drop_before(self, shelf: Shelf, oldest: int) -> None:
        """Nobody will ask for a version before `oldest`."""
        self._own(shelf)
        if not shelf.replaced:
            return
        for number in list(shelf.replaced):
            unit = shelf.units[number]
            common = set.intersection(*(set(one.bases) for one in shelf.slices(number)))
            base = max((one for one in common if one <= oldest), default=-1)
            lost = [one for one in unit.bases if one <= oldest and one not in common]
            shelf.drop(unit.bases, [*lost, *(one for one in common if one < base)])
            shelf.drop(unit.log, [one for one in unit.log if one < base])
            if all(one <= oldest for one in unit.bases):
                shelf.replaced.discard(number)
        first = min(min(unit.bases, default=-1) for unit in shelf.units.values())
        shelf.drop(shelf.notes, [note for note in shelf.notes if note < first])

    def fetch(
        self, rank: int, version: int, wanted: int = -1
    ) -> tuple[VaultFetched, list[StoredPiece]]:
        """`wanted`: version of the bases, if it matters. Where all units have bases of one version
        these are taken: what depends on several units cannot begin with bases of different ones."""
        shelf = self._shelves.get(rank)
        if shelf is None:
            raise Refusal("lacks", f"nothing of rank {rank} is in this vault")
        fit = _fit(shelf, version)
        common = max(set.intersection(*fit.values()), default=-1) if fit and wanted < 0 else wanted
        units, pieces, first = [], [], version
        for number, unit in sorted(shelf.units.items()):
            bases = [one for one in fit[number % SLICES] if common in (-1, one)]
            if not bases:
                lack = _lack(shelf, number, version)
                raise Refusal("lacks", f"rank {rank} cannot be brought to {version}: {lack}")
            base = max(bases)
            first = min(first, base)
            log = [(one, unit.log[one]) for one in range(base, version)]
            tensors = unit.bases[base]
            described = VaultUnit(
                unit=number,
                version=base,
                sizes=[len(piece.data) for piece in tensors],
                digests=[piece.digest for piece in tensors],
                log=[_described(one, found) for one, found in log],
            )
            units.append(described)
            pieces += [*tensors, *(piece for _, found in log for piece in found)]
        notes = [(one, shelf.notes[one]) for one in sorted(shelf.notes) if first <= one < version]
        pieces += [piece for _, found in notes for piece in found]
        listed = [_described(one, found) for one, found in notes]
        return VaultFetched(layout=shelf.layout, units=units, notes=listed), pieces

    def forget(self, rank: int, generation: int) -> None:
        """`generation`: of the one who asks."""
        seen = self._fences.get(rank, (0, 0))[0]
        if generation < seen:
            raise Refusal("fenced", f"the vault of rank {rank} is of generation {seen} already")
        self._shelves.pop(rank, None)

    def left(self, rank: int) -> None:
        """The rank has no process here any more, and training goes on without those it had."""
        shelf = self._shelves.get(rank)
        if shelf is not None and shelf.own:
            del self._shelves[rank]

    def forget_before(self, generation: int) -> None:
        """The job went back behind what earlier writers have put."""
        for rank, shelf in list(self._shelves.items()):
            if shelf.fence[0] < generation:
                del self._shelves[rank]

    def held(self) -> dict[int, tuple[int, int]]:
        return {rank: (shelf.held, shelf.reserved) for rank, shelf in self._shelves.items()}


def _promised(shelves: Iterable[Shelf]) -> int:
    return sum(max(shelf.reserved - shelf.held, 0) for shelf in shelves)


def _fit(shelf: Shelf, version: int) -> dict[int, set[int]]:
    """Of every unit, slices or not, the bases that can be brought to `version`."""
    found: dict[int, set[int]] = {}
    for number, unit in shelf.units.items():
        fit = unit.fit(version)
        found[number % SLICES] = found.get(number % SLICES, fit) & fit
    return found


def _lack(shelf: Shelf, unit: int, version: int) -> str:
    slices = shelf.slices(unit)
    lacking = [one for one in slices if not one.fit(version)]
    return f"unit {unit % SLICES} {(lacking or slices)[0].lack(version)}"


def _described(version: int, pieces: Pieces) -> tuple[int, int, bytes]:
    return (version, size_of(pieces), pieces[0].digest if pieces else b"")
