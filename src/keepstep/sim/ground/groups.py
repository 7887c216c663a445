"""Process groups: rendezvous in a store, collectives, and how they break.

A group belongs to one generation and to the processes that met in its store. A collective of a
tick completes when all ranks of the group have entered it; then each rank learns of it at its own
time, so a fault can find some ranks behind the fence and others still in it. When a process leaves
the group (it died, or was told to abort), the others' collectives fail, each at its own time.
"""

from __future__ import annotations

from typing import Protocol

from keepstep.sim.ground.connections import SILENT_NS, Net, Reachable
from keepstep.sim.times import MS, SECOND

POLL_NS = 500 * MS


class GroupPeer(Protocol):
    """A process that meets others, and what it is told of that."""

    @property
    def rank(self) -> int: ...

    @property
    def tick(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def mode(self) -> str: ...

    @property
    def node(self) -> Reachable: ...

    @property
    def group(self) -> Group | None: ...

    def met(self, group: Group) -> None: ...

    def stage_failed(self, generation: int, why: str) -> None: ...

    def fence_passed(self, group: Group, tick: int) -> None: ...

    def connection_lost(self, group: Group) -> None: ...

    def all_came(self, group: Group) -> None:
        """Everybody is in attach."""
        ...


class Group:
    def __init__(self, net: Net, generation: int, members: dict[int, GroupPeer]) -> None:
        self._net = net
        self._clock = net.clock
        self.generation = generation
        self.members = members
        self.left: set[int] = set()
        # tick -> rank -> (value, hold word, snapshot word)
        self.entered: dict[int, dict[int, tuple[int, int, int]]] = {}
        # tick that all have entered -> values in order of ranks, the newest hold and snapshot
        self._whole: dict[int, tuple[list[int], int, int]] = {}

    def enter(self, rank: GroupPeer, value: int, hold: int, snapshot: int) -> None:
        if rank.rank in self.left or self.left:
            self._tell_broken(rank, 0)
            return
        here = self.entered.setdefault(rank.tick, {})
        here[rank.rank] = (value, hold, snapshot)
        if len(self.entered) > 3:
            for tick in [tick for tick in self.entered if tick < rank.tick - 2]:
                del self.entered[tick]
                self._whole.pop(tick, None)
        if len(here) == len(self.members):
            given = [here[number] for number in sorted(here)]
            values, holds, snapshots = zip(*given, strict=True)
            self._whole[rank.tick] = list(values), max(holds), max(snapshots)
            for member in self.members.values():
                late = self._clock.random.random() < 0.02
                delay = 300_000 + self._clock.random.randrange(150 * MS if late else 1_200_000)
                self._clock.after(delay, self._pass, member, rank.tick)

    def complete(self, tick: int) -> list[int] | None:
        """Contributions of all ranks to that collective, if it is complete."""
        return self._whole[tick][0] if tick in self._whole else None

    def hold_word(self, tick: int) -> int:
        """The newest counts: a rank whose agent was away may not have heard that an older move was
        given up."""
        return self._whole[tick][1]

    def snapshot_word(self, tick: int) -> int:
        return self._whole[tick][2]

    def _pass(self, member: GroupPeer, tick: int) -> None:
        if member.group is not self or not member.alive:
            return
        if not self._in_reach(member):
            self._clock.after(POLL_NS, self._pass, member, tick)
            return
        member.fence_passed(self, tick)

    def _in_reach(self, member: GroupPeer) -> bool:
        net = self._net
        if not net.any_cut():
            return True
        nodes = {other.node.name for other in self.members.values()}
        return all(net.both_ways(member.node.name, node) for node in nodes)

    def leave(self, rank: GroupPeer) -> None:
        """The first one to leave breaks it for all; whoever leaves later changes nothing."""
        first = not self.left
        self.left.add(rank.rank)
        if first:
            now = self._clock.now
            for other in self.members.values():
                if other is not rank:
                    delay = self._net.delay(rank.node.name, other.node.name)
                    self._clock.after(delay, self._break, rank.node.name, other, now)

    def _break(self, source: str, other: GroupPeer, since: int) -> None:
        if not other.alive or other.group is not self:
            return
        silent = self._clock.now - since > SILENT_NS
        if self._net.is_cut(source, other.node.name) and not silent:
            self._clock.after(POLL_NS, self._break, source, other, since)
            return
        other.connection_lost(self)

    def _tell_broken(self, rank: GroupPeer, delay: int) -> None:
        self._clock.after(delay + MS, self._break, rank.node.name, rank, self._clock.now)

    def reset(self) -> None:
        """Fault: connections inside the group break although everybody lives."""
        for member in self.members.values():
            self._tell_broken(member, self._clock.random.randrange(20 * MS))
        self.left.add(-1)


class SimStore:
    """The rendezvous of one generation, on one node."""

    def __init__(self, net: Net, generation: int, ranks: int) -> None:
        self._net = net
        self._ranks = ranks
        self.generation = generation
        self.waiting: dict[int, GroupPeer] = {}
        self.open = True

    def meet(self, rank: GroupPeer) -> None:
        if not self.open:
            rank.stage_failed(self.generation, "connection refused")
            return
        self.waiting[rank.rank] = rank
        if rank.mode == "init":  # a script's own rendezvous has a limit, one for a move has none
            self._net.clock.after(60 * SECOND, self._late, rank)
        if len(self.waiting) < self._ranks:
            return
        members = dict(sorted(self.waiting.items()))
        self.waiting = {}
        group = Group(self._net, self.generation, members)
        for number, member in members.items():
            if not member.alive:
                group.left.add(number)
        for member in members.values():
            delay = 5 * MS + self._net.clock.random.randrange(60 * MS)
            self._net.clock.after(delay, member.met, group)

    def _late(self, rank: GroupPeer) -> None:
        if self.waiting.get(rank.rank) is rank:
            del self.waiting[rank.rank]
            rank.stage_failed(self.generation, "timed out")

    def close(self) -> None:
        self.open = False
        for rank in self.waiting.values():
            self._net.clock.after(MS, rank.stage_failed, self.generation, "connection reset")
        self.waiting = {}
