"""A worker process, with opaque numbers in place of tensors.

A process is started with a rank, or is parked until it is given one, and then comes to be that rank
as core/rank/joining says. A mode of one that has no place in the job yet:

    starting parked building arrived warming joining copying swapping
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keepstep.core.rank import asks
from keepstep.core.rank.joining import Joining, park
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.model.page import CHECKPOINT_TICK
from keepstep.sim.ground import training
from keepstep.sim.ground.memory import Blob, restored
from keepstep.sim.ground.violation import violated
from keepstep.sim.ground.world_view import HomeNode, StateHolder
from keepstep.sim.rank.member import Member
from keepstep.sim.rank.worker import PENDING
from keepstep.sim.times import SECOND


class Rank(Member):
    copy: commands.Copy | None = None

    def _started(self) -> None:
        if self.place in self.world.ills.bad_slots:
            self.exit(1, "RuntimeError: no such device")
            return
        if self.rank < 0:
            self.go("parked")
            self.run(park(self.inbox, m.Parked(where="train.py:7", warm_ns=1)), self._assigned)
            return
        self.go("init")
        self.staging.begin(self.generation)
        self._meet(self.generation, self.master)

    def _assigned(self, command: commands.Assign) -> None:
        self.assigned, self.joining = command, Joining(self.inbox, command)
        self.rank = command.rank
        self.own = 0
        self.go("building")
        self.after(SECOND // 2 + self.world.random.randrange(2 * SECOND), self._arrive)

    def _arrive(self) -> None:
        self.go("arrived")
        self.say(self.attached(self.assigned.generation))
        self.run(self.joining.arrive(), self._position)

    def _position(self, command: commands.Position) -> None:
        self.go("warming")
        if command.tick == CHECKPOINT_TICK:
            self._positioned(self._from_checkpoint())
        elif command.tick == 0:
            self._positioned(None)
        else:
            self._fetch(command.holders, command.tick, self._positioned)

    def _positioned(self, blob: Blob | None, silent: bool = False) -> None:
        if blob is not None:
            self.tick, self.version, self.own = blob
        self.after(SECOND // 4 + self.world.random.randrange(SECOND), self._ready)

    def _ready(self) -> None:
        self.go("joining")
        ready = m.Ready(generation=self.assigned.generation, arrived_ns=1, warm_ns=1)
        self.run(self.joining.ready(ready), lambda _: self._join())

    def _join(self) -> None:
        """Its script has no way to go between its first call and the entry that follows."""
        self.run(self.joining.enter(), self._joined)

    def _joined(self, command: commands.Swap) -> None:
        self.run(self.recovering.swap(command), lambda _: self._begin())

    def _notice_abort(self) -> None:
        if self.mode == "swapping" and self.copy and self.inbox.aborted(self.copy.generation):
            self.go("joining")
        super()._notice_abort()

    def perform(self, ask: asks.Ask) -> Any:
        if isinstance(ask, asks.Take):
            self._take(ask.command)
            return PENDING
        return super().perform(ask)

    def _fetch(
        self, holders: list[m.Address], tick: int, then: Callable[..., None], silent: bool = False
    ) -> None:
        """Ask every holder in turn; None when no one has it, or when somebody did not answer."""
        if not holders:
            self.after(5 * SECOND if silent else 0, then, None, silent)
            return
        node = self.world.blobs_at(holders[0])
        epoch = self.epoch

        def answered(blob: Blob | None) -> None:
            if blob is not None:
                self._due(epoch, then, (blob,))
            else:
                self._due(epoch, self._fetch, (holders[1:], tick, then, silent))

        def failed(why: str) -> None:
            self._due(epoch, self._fetch, (holders[1:], tick, then, True))

        self.world.net.ask(
            self.node.name, node, lambda: node.memory.blob(self.rank, tick), answered, failed
        )

    def _take(self, command: commands.Copy) -> None:
        self.go("copying")
        self.copy = command
        if command.checkpoint:
            wait = self.world.plan.copy_ns
            if self.world.shared_disk.is_spoiled(command.checkpoint):
                self.after(wait, self._copy_failed, "checkpoint", "a digest is another one")
            else:
                self.after(wait, self._copied, self._from_checkpoint(), None)
        elif command.tick == 0:
            self._pull((0, 0, training.first_own(self.rank)), list(command.sources))
        else:
            self._fetch(command.holders, command.tick, self._fetched)

    def _fetched(self, blob: Blob | None, silent: bool = False) -> None:
        assert self.copy is not None
        if blob is None and silent:
            self._copy_failed("side-state-unreachable", "somebody did not answer")
        elif blob is None:
            self._copy_failed(
                "side-state-missing", f"side state {self.copy.tick} is held by nobody"
            )
        else:
            self._pull(blob, list(self.copy.sources))

    def _pull(self, blob: Blob, sources: list[commands.Source], lost: int = -1) -> None:
        assert self.copy is not None
        if not sources:
            self._copy_failed("source-lost", "no source is left", lost)
            return
        wait = self.world.plan.copy_ns // 2 + self.world.random.randrange(self.world.plan.copy_ns)
        self.after(wait, self._pulled, blob, sources)

    def _pulled(self, blob: Blob, sources: list[commands.Source]) -> None:
        assert self.copy is not None
        source = self.world.ranks.get(sources[0].serve.host)
        copy = self.copy
        serves = (
            source is not None
            and source.alive
            and not source.stopped
            and source.mode == "held"
            and source.held_generation == sources[0].serve.port
            and source.tick == copy.tick
            and self.world.net.both_ways(self.node.name, source.node.name)
        )
        if not serves or source is None:
            # Whoever does not hold any more has closed its server; only silence takes time.
            silent = source is not None and (source.stopped or source.node.vanished)
            reached = source is not None and self.world.net.both_ways(
                self.node.name, source.node.name
            )
            wait = 3 * SECOND if silent or not reached else 0
            self.after(wait, self._pull, blob, sources[1:], sources[0].rank)
            return
        self._restore(blob, source)

    def _restore(self, blob: Blob, source: StateHolder) -> None:
        """What no other rank has; a leaver still has it. All who may have it are asked."""
        assert self.copy is not None
        if source.rank == self.rank or not self.has_shard or blob[1] == 0:
            first = training.first_shard(self.rank)
            self.shard = source.shard if source.rank == self.rank else first
            self._copied(blob, source)
            return
        nodes = [self.world.blobs_at(address) for address in self.copy.holders]
        epoch, heard_of = self.epoch, dict[str, bool]()

        def heard(name: str, answered: bool, _: object) -> None:
            heard_of[name] = answered
            if len(heard_of) == len(nodes):
                there = [one for one in nodes if heard_of[one.name]]
                self._due(epoch, self._heard, (blob, source, there, len(there) < len(nodes)))

        for node in nodes:
            yes, no = (functools.partial(heard, node.name, answer) for answer in (True, False))
            self.world.net.ask(self.node.name, node, lambda: None, yes, no)

    def _heard(self, blob: Blob, source: StateHolder, there: list[HomeNode], silent: bool) -> None:
        shard = restored([node.memory for node in there], self.rank, blob[1])
        if shard is not None:
            self.shard = shard
            self._copied(blob, source)
        elif silent:
            self._copy_failed("side-state-unreachable", "somebody did not answer")
        else:
            self._copy_failed("shards-missing", f"the shard of rank {self.rank} is in no vault")

    def _from_checkpoint(self) -> Blob:
        path, tick, truth = self.assigned.checkpoint, self.world.plan.resume_tick, self.world.truth
        saved = self.world.shared_disk.saved
        if path in saved:
            part = saved[path][self.rank]
            self.shared, self.shard = part.shared, part.shard
            return part.tick, part.version, part.own
        if path != self.world.plan.spec().resume:
            violated(f"{self.id} is to start from {path}, which is not there")
        self.shared, self.shard = truth.shared[tick], truth.shard[tick][self.rank]
        return tick, truth.version[tick], truth.own[tick][self.rank]

    def _copied(self, blob: Blob, source: StateHolder | None) -> None:
        assert self.copy is not None
        self.tick, self.version, self.own = blob
        if source is not None:
            self.shared = source.shared
        self.node.memory.publish(self.id, self.rank, blob)
        self.go("swapping")
        self.reply(
            m.Copied(
                generation=self.copy.generation,
                tick=self.tick,
                bytes_copied=1,
                copy_ns=1,
                sources=[source.rank] if source is not None else [],
                side_state="own-agent" if source is not None else "checkpoint",
            )
        )

    def _copy_failed(self, reason: Any, error: str, source: int = -1) -> None:
        assert self.copy is not None
        self.go("joining")
        generation = self.copy.generation
        self.reply(m.CopyFailed(generation=generation, reason=reason, error=error, source=source))
