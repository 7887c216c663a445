"""State that no other rank has, in worlds with parities: a shard of one number in each rank.

Vaults and parities are the production ones (`core/agent/vault.py`, `core/agent/parity.py`), each in
the memory of its node. What ranks do with them follows worker/vault/redundancy.py and parity.py:
bases at the same versions and behind every swap, gradients at the fence, to the own agent and to
the holder of the parity; without the latter they go on, and ask for another one. `restored` is the
way back (worker/vault/rebuild.py).

Digests are the bytes themselves. The line to the own agent never breaks here, and what a connection
to the holder carries arrives in two lots, with the base of a version and at its fence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from keepstep.core.agent.vault import Piece, Refusal
from keepstep.model import messages as m
from keepstep.model import vault as v
from keepstep.sim import training
from keepstep.sim.saver import Saver

if TYPE_CHECKING:
    from keepstep.sim.node import SimNode

RENEW = 4  # as keepstep.worker.vault.bases
ROOM = 1 << 30


class Put(NamedTuple):
    kind: v.Kind
    version: int
    data: bytes


class Keeper(Saver):
    realign = True  # all ranks put bases at the version that they have now
    aligned = -1  # version at which they did last
    base = begun = -1  # version of the newest base; version whose base was looked after
    common = -1  # version of the last base that all members put; -1: nothing goes to the parity
    serial = 0
    line: m.Parity | None = None  # it writes to
    former: tuple[m.Address, int] | None = None  # and the version from which on it is

    @property
    def has_shard(self) -> bool:
        return self.world.plan.parity

    def _encoded(self, number: int) -> bytes:
        """Not of one length on all ranks."""
        return number.to_bytes(8, "little", signed=True) * (1 + self.rank % 3)

    def _opening(self, group: Sequence[int] = ()) -> v.VaultOpen:
        self.serial += 1
        return v.VaultOpen(
            token="",
            rank=self.rank,
            generation=max(self.generation, 0),
            serial=self.serial,
            layout=b"",
            units=[0],
            reserve=1 << 20,
            own=not group,
            group=list(group),
        )

    def connect_shard(self) -> None:
        """At attach, and after every swap."""
        if self.has_shard:
            store = self.node.vault
            writer = store.open(self._opening(), ROOM)
            if store.reaches(writer) < self.version:
                self.base = -1
            self.realign, self.begun, self.common = True, -1, -1

    def begin_shard(self) -> None:
        """A step begins: its base may be due, and is on its way while the step computes."""
        if not self.has_shard or not training.is_step(self.tick) or self.begun == self.version:
            return
        version = self.begun = self.version
        if self.realign or version % RENEW == 0:
            self.realign, self.aligned = False, version
        self.unsynced: list[Put] = []
        if self.aligned == version:
            self._begin_parity(version)
        elif self.base >= 0:
            return
        self.base = version
        self._keep(Put("base", version, self._encoded(self.shard)))
        if self.common == version:
            self._write(self.unsynced, lambda why: None)

    def _begin_parity(self, version: int) -> None:
        self.common = version if self.parity is not None else -1
        if self.parity is None:
            return
        old, self.line = self.line, self.parity
        if old is not None and old.holder != self.line.holder and self.former is None:
            self.former = old.holder, version

    def _keep(self, put: Put, settled: int = -1) -> None:
        why = stored(self.node.vault, self._opening(), [put], settled)
        if why:
            self.world.checker.violated(f"{self.id} cannot write to its own vault: {why}")
        if self.common >= 0 and (put.kind != "base" or put.version == self.common):
            self.unsynced.append(put)

    def secure_shard(self) -> None:
        """At the fence: what leads to the next version is where it outlives this rank."""
        if not self.has_shard or not training.is_step(self.tick):
            self._enter_fence()
            return
        self.begin_shard()
        gradient = training.gradient(self.shared, self.tick, self.rank)
        self._keep(Put("grad", self.version, self._encoded(gradient)))
        self._keep(Put("note", self.version, self._encoded(self.version)), self.version - 1)
        if self.common < 0:
            self._enter_fence()
            return
        if self.mode != "publish":
            self.go("publish")
        self._sync(False)

    def _sync(self, again: bool) -> None:
        epoch = self.epoch
        self._write(self.unsynced, lambda why: self._due(epoch, self._synced, (why, again)))

    def _write(self, puts: Iterable[Put], then: Any) -> None:
        assert self.line is not None
        node, puts, settled = self.world.blobs_at(self.line.holder), list(puts), self.version - 1
        opening = self._opening(self.line.members)
        self.world.net.ask(
            self.node.name, node, lambda: stored(node.parity, opening, puts, settled), then, then
        )

    def _synced(self, why: str, again: bool) -> None:
        assert self.line is not None
        if why and not again:
            self.marks += 1  # the limit of a connection is far below the stall timeout
            self._sync(True)
            return
        self.unsynced = []
        if why:
            self.common = -1
            lost = self.line.holder
            self.say(m.BuddyLost(generation=self.generation, error=why, parity=lost))
        elif self.former is not None and self.version > self.former[1]:
            self._forget_former(self.former[0])
        self._enter_fence()

    def _forget_former(self, address: m.Address) -> None:
        """All members have reached the fence before this one, with bases at the new holder."""
        self.former = None
        node, rank, generation = self.world.blobs_at(address), self.rank, max(self.generation, 0)

        def forget() -> None:
            try:
                node.parity.forget(rank, generation)
            except Refusal:
                pass  # it is used again

        self.world.net.ask(self.node.name, node, forget, lambda _: None, lambda _: None)

    def apply_to_shard(self) -> None:
        if self.has_shard and training.is_step(self.tick):
            gradient = training.gradient(self.shared, self.tick, self.rank)
            self.shard = training.next_shard(self.shard, gradient)

    def _enter_fence(self) -> None:
        raise NotImplementedError


def stored(into: Any, opening: v.VaultOpen, puts: Iterable[Put], settled: int) -> str:
    """Into a vault or a parity, as the agent's server does it; what was refused, in words."""
    try:
        writer = into.open(opening, ROOM)
        for kind, version, data in puts:
            put = v.VaultPut(kind=kind, version=version, sizes=[len(data)], digests=[data])
            into.admit(writer, put)
            into.keep(writer, put, (Piece(memoryview(bytearray(data)), data),))
            into.done(writer, put)
        if settled >= 0:
            into.settle(writer, settled)
    except Refusal as refusal:
        return str(refusal)
    return ""


# ------------------------------------------------------------------------------------ way back

Content = dict[tuple[v.Kind, int], bytes]


def restored(nodes: Sequence[SimNode], rank: int, version: int) -> int | None:
    """The rank's shard, from what these nodes have; None if it cannot be had."""
    content = _from_vaults(nodes, rank, version) or _from_parity(nodes, rank, version)
    if content is None:
        return None
    first = min(at for kind, at in content if kind == "base")
    shard = _decoded(content["base", first])
    for step in range(first, version):
        shard = training.next_shard(shard, _decoded(content["grad", step]))
    return shard


def _decoded(data: bytes) -> int:
    return int.from_bytes(data[:8], "little", signed=True)


def _from_vaults(
    nodes: Iterable[SimNode], rank: int, version: int, base: int = -1
) -> Content | None:
    for node in nodes:
        try:
            found, pieces = node.vault.fetch(rank, version, base)
        except Refusal:
            continue
        keys: list[tuple[v.Kind, int]] = [("base", found.units[0].version)]
        keys += [("grad", step) for step, _, _ in found.units[0].log]
        keys += [("note", step) for step, _, _ in found.notes]
        return {key: bytes(piece.data) for key, piece in zip(keys, pieces, strict=True)}
    return None


def _from_parity(nodes: Sequence[SimNode], rank: int, version: int) -> Content | None:
    """Whoever kept the parity before may still have it: each is asked, for all of its bases."""
    waiting = [(node, -1) for node in nodes]
    while waiting:
        node, base = waiting.pop(0)
        try:
            parity, segments = node.parity.fetch(rank, version, base)
        except Refusal:
            continue
        if base < 0:
            waiting += [(node, other) for other in parity.bases[1:]]
        found = _taken_apart(nodes, parity, b"".join(segments), rank, version)
        if found is not None:
            return found
    return None


def _taken_apart(
    nodes: Sequence[SimNode], parity: v.VaultParity, data: bytes, rank: int, version: int
) -> Content | None:
    others = {one for cell in parity.cells for one in cell.parts if one != rank}
    base = min(cell.version for cell in parity.cells)
    theirs = {one: _from_vaults(nodes, one, version, base) for one in sorted(others)}
    content: Content = {}
    for cell in parity.cells:
        left, data = int.from_bytes(data[: cell.size], "little"), data[cell.size :]
        for one in cell.parts:
            mine = (theirs[one] or {}).get((cell.kind, cell.version)) if one != rank else b""
            if mine is None or (one != rank and [mine] != cell.parts[one][0].digests):
                return None
            left ^= int.from_bytes(mine, "little")
        (size,), digests = cell.parts[rank][0].sizes, cell.parts[rank][0].digests
        content[cell.kind, cell.version] = left.to_bytes(cell.size, "little")[:size]
        if [content[cell.kind, cell.version]] != digests:
            return None
    return content


@contextmanager
def unseen(nodes: Iterable[SimNode]) -> Iterator[None]:
    """A look by nobody: a parity that is fetched takes no more, and these are as they were."""
    cells = [
        cell
        for node in nodes
        for group in node.parity._groups.values()
        for cell in group.cells.values()
    ]
    before = [cell.fetched for cell in cells]
    yield
    for cell, fetched in zip(cells, before, strict=True):
        cell.fetched = fetched
