"""The parity of a group: the XOR of what its members keep in the vaults of their own agents.

The own agent's vault covers the loss of a process. For the loss of a node one more copy of
everything would do; the XOR over n members, kept by a node that none of them is on, does it with
the memory of one. Whoever takes a lost member over asks for the XOR, and the other members'
agents for their bytes, and takes these out.

A *cell* is the XOR of one kind (bases, gradients, or the note) of one version. To a cell each
member adds the bytes of all its puts, one behind the other in the order they come, and the cell is
as long as the longest of these strings. What was added when is on record: unit, sizes, digests. So
a cell is good for a member whatever others have added or not, as long as these still have
the bytes. They have, because all members renew their bases at the same versions: who drops what
lies before a base stands at a later fence, and all others have that base by then.

What is added cannot be taken out again, for nobody here has it. Hence a put is added when it is
complete, and the same put that comes again (a connection broke before its answer) only counts
once. A step that is made again is of another generation, and has cells of its own; the older ones
go when all who are in them are in the newer one. A rank that sends other bytes for the same step of
the same generation has spoiled the cell. And what is being fetched is not added to any more: a
migration goes on, after which all begin with new bases.

Writers are fenced as those of a vault are. Of a group the largest reservation of a member counts;
what is just being received is not counted, one put of each stream of a member.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from keepstep.core.agent.vault import MORE_MEMORY, Pieces, Refusal, mib
from keepstep.model.vault import Kind, ParityCell, ParityPart, VaultOpen, VaultParity, VaultPut

NOTE = frozenset({0})  # the one unit of a note


def xor(into: memoryview, data: memoryview) -> None:
    """`into` ^= `data`, which are of one length."""
    import numpy as np  # not before it is needed: most agents never do

    target = np.frombuffer(into, np.uint8)
    np.bitwise_xor(target, np.frombuffer(data, np.uint8), out=target)


@dataclass(slots=True)
class XorCell:
    segments: list[memoryview] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # of the segments
    parts: dict[int, dict[int, ParityPart]] = field(default_factory=dict)  # rank -> unit, in order
    lengths: dict[int, int] = field(default_factory=dict)  # rank -> bytes
    fetched: bool = False
    spoiled: bool = False

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def has(self, rank: int, units: frozenset[int]) -> bool:
        return not self.spoiled and units <= self.parts.get(rank, {}).keys()

    def add(self, rank: int, unit: int, pieces: Pieces) -> None:
        for piece in pieces:
            self._fold(self.lengths.get(rank, 0), piece.data)
            self.lengths[rank] = self.lengths.get(rank, 0) + len(piece.data)
        self.parts.setdefault(rank, {})[unit] = ParityPart(
            unit=unit,
            sizes=[len(piece.data) for piece in pieces],
            digests=[piece.digest for piece in pieces],
        )

    def _fold(self, start: int, data: memoryview) -> None:
        index = bisect_right(self.ends, start)
        whole = data
        while data and index < len(self.ends):
            segment, end = self.segments[index], self.ends[index]
            count = min(end - start, len(data))
            inside = start - (end - len(segment))
            xor(segment[inside : inside + count], data[:count])
            start, data, index = start + count, data[count:], index + 1
        if data:
            # A rest would keep the memory of the whole put.
            self.segments.append(data if len(data) == len(whole) else memoryview(bytearray(data)))
            self.ends.append(start + len(data))


@dataclass(eq=False)
class ParityGroup:
    ranks: tuple[int, ...]
    members: dict[int, ParityMember] = field(default_factory=dict)
    cells: dict[tuple[Kind, int, int], XorCell] = field(default_factory=dict)  # version, generation
    held: int = 0

    @property
    def reserved(self) -> int:
        return max((member.reserved for member in self.members.values()), default=0)

    def newest(self, kind: Kind, version: int, rank: int) -> XorCell | None:
        """In which the rank has all of it."""
        units = NOTE if kind == "note" else self.members[rank].units
        found = [
            (generation, cell)
            for (other, at, generation), cell in self.cells.items()
            if (other, at) == (kind, version) and cell.has(rank, units)
        ]
        return max(found, key=lambda one: one[0])[1] if found else None

    def bases(self, rank: int) -> list[int]:
        versions = {version for kind, version, _ in self.cells if kind == "base"}
        return sorted(one for one in versions if self.newest("base", one, rank) is not None)

    def reach(self, rank: int, version: int) -> int:
        """The newest version that a base of `version` can be brought to."""
        while all(self.newest(kind, version, rank) is not None for kind in ("grad", "note")):
            version += 1
        return version

    def drop(self, keys: Iterable[tuple[Kind, int, int]]) -> None:
        for key in list(keys):
            self.held -= self.cells.pop(key).size


@dataclass(eq=False)
class ParityMember:
    """One rank, in the hands of one writer."""

    group: ParityGroup
    rank: int
    fence: tuple[int, int]
    layout: bytes
    units: frozenset[int]
    reserved: int

    @property
    def held(self) -> int:
        return self.group.held


class ParityStore:
    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], ParityGroup] = {}
        self._fences: dict[int, tuple[int, int]] = {}

    def promised(self) -> int:
        groups = list(self._groups.values())  # asked from any thread
        return sum(max(group.reserved - group.held, 0) for group in groups)

    def held(self) -> dict[tuple[int, ...], tuple[int, int]]:
        return {ranks: (group.held, group.reserved) for ranks, group in self._groups.items()}

    def open(self, ask: VaultOpen, available: int) -> ParityMember:
        rank, fence = ask.rank, (ask.generation, ask.serial)
        if rank not in ask.group:
            raise Refusal("layout", f"rank {rank} is not in the group {ask.group}")
        if fence < self._fences.get(rank, fence):
            raise Refusal(
                "fenced",
                f"the parity of rank {rank} belongs to a writer of generation "
                f"{self._fences[rank][0]}, a later one than that of generation {ask.generation}",
            )
        ranks = tuple(ask.group)
        group = self._groups.get(ranks) or ParityGroup(ranks)
        units = frozenset(ask.units)
        old = group.members.get(rank)
        inside = any(rank in cell.parts for cell in group.cells.values())
        if old is not None and inside and (old.layout, old.units) != (ask.layout, units):
            raise Refusal("layout", f"the parity has other units of rank {rank} than this writer")
        needed = max(ask.reserve - max(group.reserved, group.held), 0)
        left = available - self.promised()
        if needed > left:
            raise Refusal(
                "memory",
                f"the parity of ranks {list(ranks)} takes {mib(needed)} of host memory, and "
                f"{mib(max(left, 0))} are left where it is kept",
                MORE_MEMORY,
            )
        self._groups[ranks] = group
        self._fences[rank] = fence
        if old is not None and old.fence == fence:
            old.reserved = ask.reserve  # one more stream of the same writer
            return old
        member = ParityMember(group, rank, fence, ask.layout, units, ask.reserve)
        group.members[rank] = member
        return member

    def reaches(self, member: ParityMember) -> int:
        group = member.group
        return max((group.reach(member.rank, one) for one in group.bases(member.rank)), default=-1)

    def _own(self, member: ParityMember) -> None:
        group = self._groups.get(member.group.ranks)
        if group is not member.group or group.members[member.rank] is not member:
            raise Refusal(
                "fenced",
                f"a later writer has opened the parity of rank {member.rank}, or it was forgotten; "
                f"this one is of generation {member.fence[0]}",
            )

    def _key(self, member: ParityMember, put: VaultPut) -> tuple[Kind, int, int]:
        return ("grad" if put.kind == "absent" else put.kind, put.version, member.fence[0])

    def admit(self, member: ParityMember, put: VaultPut) -> None:
        self._own(member)
        if put.kind != "note" and put.unit not in member.units:
            raise Refusal("layout", f"rank {member.rank} has no unit {put.unit}")
        group = member.group
        cell = group.cells.get(self._key(member, put), XorCell())
        more = cell.lengths.get(member.rank, 0) + sum(put.sizes) - cell.size
        if put.unit not in cell.parts.get(member.rank, {}) and group.held + more > group.reserved:
            raise Refusal(
                "memory",
                f"{more} bytes more for the parity of ranks {list(group.ranks)} are over its "
                f"reservation: {group.held} of {group.reserved} bytes are taken",
            )

    def done(self, member: ParityMember, put: VaultPut) -> None:
        """Nothing was counted for it."""

    def keep(self, member: ParityMember, put: VaultPut, pieces: Pieces) -> None:
        self._own(member)
        group, rank, key = member.group, member.rank, self._key(member, put)
        cell = group.cells.setdefault(key, XorCell())
        before = cell.parts.get(rank, {}).get(put.unit)
        if before is not None:
            if before.digests != [piece.digest for piece in pieces]:
                cell.spoiled = True
                what = f"the {key[0]} of version {put.version} and generation {key[2]}"
                raise Refusal("digest", f"rank {rank} sent two different ones of {what}")
            return
        if cell.fetched:
            return
        size = cell.size
        cell.add(rank, 0 if put.kind == "note" else put.unit, pieces)
        group.held += cell.size - size
        self._drop_replaced(group, key, cell)

    def _drop_replaced(self, group: ParityGroup, key: tuple[Kind, int, int], cell: XorCell) -> None:
        older = [one for one in group.cells if one[:2] == key[:2] and one[2] < key[2]]
        for one in older:
            if all(
                cell.has(rank, NOTE if key[0] == "note" else group.members[rank].units)
                for rank in group.cells[one].parts
            ):
                group.drop([one])

    def drop_before(self, member: ParityMember, oldest: int) -> None:
        """Nobody will ask for a version before `oldest`; and all members have the base that this
        one would begin with."""
        self._own(member)
        group = member.group
        base = max((one for one in group.bases(member.rank) if one <= oldest), default=-1)
        group.drop([key for key in group.cells if key[1] < base])

    def fetch(self, rank: int, version: int, base: int) -> tuple[VaultParity, list[memoryview]]:
        group = next((one for one in self._groups.values() if rank in one.members), None)
        if group is None:
            raise Refusal("lacks", f"no parity that rank {rank} has a part in is kept here")
        fit = [one for one in group.bases(rank) if one <= version <= group.reach(rank, one)]
        if not fit or (base >= 0 and base not in fit):
            why = f"no base {base}" if fit else "no base from which all gradients are there"
            raise Refusal("lacks", f"rank {rank} cannot be brought to {version}: {why}")
        # A base of this very version may have been sent by some members only.
        order = sorted(fit, key=lambda one: (one < version, one), reverse=True)
        first = base if base >= 0 else order[0]
        keys: list[tuple[Kind, int]] = [("base", first)]
        for step in range(first, version):
            keys += [("grad", step), ("note", step)]
        cells, data = [], []
        for kind, at in keys:
            cell = group.newest(kind, at, rank)
            assert cell is not None
            cell.fetched = True
            parts = {one: list(units.values()) for one, units in cell.parts.items()}
            cells.append(ParityCell(kind=kind, version=at, size=cell.size, parts=parts))
            data += cell.segments
        return VaultParity(layout=group.members[rank].layout, bases=order, cells=cells), data

    def forget(self, rank: int, generation: int) -> None:
        for ranks in list(self._groups):
            if rank not in ranks:
                continue
            seen = max(self._fences.get(one, (0, 0))[0] for one in ranks)
            if generation < seen:
                raise Refusal(
                    "fenced", f"the parity of rank {rank} is of generation {seen} already"
                )
            del self._groups[ranks]

    def forget_before(self, generation: int) -> None:
        """The job went back behind what earlier writers have put."""
        for ranks, group in list(self._groups.items()):
            group.drop([key for key in group.cells if key[2] < generation])
            if all(member.fence[0] < generation for member in group.members.values()):
                del self._groups[ranks]
