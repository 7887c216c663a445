"""State that no other rank has, in worlds with parities: a shard of one number in each rank.

What ranks do with the vaults and parities of their nodes (ground/memory.py) follows
worker/vault/redundancy.py and parity.py: bases at the same versions and behind every swap,
gradients at the fence, to the own agent and to the holder of the parity; without the latter they go
on, and ask for another one.

The line to the own agent never breaks here, and what a connection to the holder carries arrives in
two lots, with the base of a version and at its fence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keepstep.core.agent.vault import Refusal
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.model import vault as v
from keepstep.sim.ground import training
from keepstep.sim.ground.memory import ROOM, Put, stored
from keepstep.sim.ground.violation import ensure
from keepstep.sim.rank.saver import Saver

RENEW = 4  # as keepstep.worker.vault.bases


class SimKeeper(Saver):
    realign = True  # all ranks put bases at the version that they have now
    aligned = -1  # version at which they did last
    base = begun = -1  # version of the newest base; version whose base was looked after
    common = -1  # version of the last base that all members put; -1: nothing goes to the parity
    serial = 0
    line: commands.Parity | None = None  # it writes to
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
            store = self.node.memory.vault
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
        why = stored(self.node.memory.vault, self._opening(), [put], settled)
        ensure(not why, f"{self.id} cannot write to its own vault: {why}")
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
            self.node.name,
            node,
            lambda: stored(node.memory.parity, opening, puts, settled),
            then,
            then,
        )

    def _synced(self, why: str, again: bool) -> None:
        assert self.line is not None
        if why and not again:
            self.page.marks += 1  # the limit of a connection is far below the stall timeout
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
                node.memory.parity.forget(rank, generation)
            except Refusal:
                pass  # it is used again

        self.world.net.ask(self.node.name, node, forget, lambda _: None, lambda _: None)

    def apply_to_shard(self) -> None:
        if self.has_shard and training.is_step(self.tick):
            gradient = training.gradient(self.shared, self.tick, self.rank)
            self.shard = training.next_shard(self.shard, gradient)

    def _enter_fence(self) -> None:
        raise NotImplementedError
