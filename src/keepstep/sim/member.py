"""A process that has a rank: its groups, its transactions, its recovery.

It follows keepstep.worker step by step (stager, transaction, recovery). A mode:

    init compute publish fence diverged apply | grace failing deciding held | done
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.model import messages as m
from keepstep.sim import training
from keepstep.sim.groups import Group
from keepstep.sim.net import MS, SECOND
from keepstep.sim.process import Blob
from keepstep.sim.witness import Doubter


class Member(Doubter):
    # ------------------------------------------------------------------ groups

    def _on_abort(self) -> None:
        if self.staged is not None and self.staged.generation < self.abort_generation:
            self.staged = None
        if self.rank < 0 or self.mode in ("starting", "init"):
            return
        if self.generation < self.abort_generation:
            self.leave_group()
        if not self.hung:
            self._notice_abort()

    def _notice_abort(self) -> None:
        """What the main thread waits for fails, or is taken as a reason to stop waiting."""
        if self.mode in ("publish", "fence", "diverged"):
            self._interrupted("comm", self.mode != "publish")
        elif self.mode in ("grace", "failing"):
            self._report()
        else:
            self.pump()

    def leave_group(self) -> None:
        if self.group is not None:
            self.group.leave(self)

    def _meet(self, generation: int, store: m.Address) -> None:
        host = self.world.store_at(store)
        self.world.net.ask(
            self.node.name,
            host,
            lambda: host.stores.get(generation),
            lambda found: self.thread(self._found, generation, found),
            lambda why: self.stage_failed(generation, why),
        )

    def _found(self, generation: int, store: Any) -> None:
        if store is None or not store.open:
            self.stage_failed(generation, "connection refused")
        elif self.abort_generation <= generation:
            store.meet(self)

    def stage_failed(self, generation: int, why: str) -> None:
        self.thread(self._stage_failed, generation, why)

    def _stage_failed(self, generation: int, why: str) -> None:
        if self.mode == "init":
            self.exit(1, f"RuntimeError: no process group: {why}")
        elif self.abort_generation <= generation and self.stage_asked == generation:
            self.stage_asked = -1
            self.say(m.StageFailed(generation=generation, error=why))

    def met(self, group: Group) -> None:
        self.thread(self._met, group)

    def _met(self, group: Group) -> None:
        generation = group.generation
        if group.left:
            self._stage_failed(generation, "a peer is gone")
        elif self.mode == "init":
            self.group = group
            if self.world.plan.model_ns:
                self.go("construct")
                self.after(self.world.plan.model_ns, self._attach, group)
            else:
                self._attached(generation)
        elif self.abort_generation > generation or self.stage_asked != generation:
            group.leave(self)
        elif self.builder_stuck:
            self.builder_stuck = False
        else:
            self.staged = group
            self.say(m.Staged(generation=generation))

    def _attach(self, group: Group) -> None:
        """Whoever comes waits for all others."""
        self.go("attaching")
        inside = [member for member in group.members.values() if member.mode == "attaching"]
        for member in inside if len(inside) == len(group.members) else ():
            member.thread(member._attached, group.generation)

    def _attached(self, generation: int) -> None:
        self.say(attached(self, generation))
        self.connect_shard()
        self._begin()

    # ------------------------------------------------------------------ transaction

    def _begin(self) -> None:
        self.in_fence = False
        if self.tick >= self.world.target:
            self.done = True
            self.go("done")
            self.say(m.Done(tick=self.tick, version=self.version))
            self.pump()
            return
        if self.aborted():
            self.computing = False
            self._interrupted("", False)
            return
        self.world.checker.ensure(not self.alone, f"rank {self.rank} begins a step alone")
        self.go("compute")
        self.computing = self.stepping = True
        self.marks += 1
        self.begin_shard()
        plan = self.world.plan
        step_ns = plan.step_ns + self.world.random.randrange(plan.step_ns // 4)
        step_ns *= self.world.dragged.get(f"{self.node.name}/{self.slot}", 1)
        self.pace.begins(self.world.now)
        for pulse_ns in range(plan.stall_ns // 2, step_ns, plan.stall_ns // 2):
            self.after(pulse_ns, self._get_on)  # a long step shows that it gets on
        self.after(step_ns, self._computed)

    def _get_on(self) -> None:
        self.marks += 1

    def _computed(self) -> None:
        self.marks += 1
        self.pace.meets(self.world.now)
        if self.error:
            kind, self.error = self.error, ""
            self._interrupted(kind, False)
            return
        if self.aborted():
            self._interrupted("comm", False)
            return
        tick = self.tick
        version = self.version + training.is_step(tick)
        blob = (tick + 1, version, training.next_own(self.own, tick, self.rank))
        self.node.publish(self, blob)
        self._publish(blob, self.secure_shard)

    def _publish(self, blob: Blob, then: Callable[[], None]) -> None:
        """To the buddy, acknowledged. An Abort interrupts it: the fence is then not reached."""
        if self.buddy is None:
            then()
            return
        if self.mode != "publish":
            self.go("publish")
        self._put(blob, then, self.epoch)

    def _put(self, blob: Blob, then: Callable[[], None], epoch: int) -> None:
        address = self.buddy
        if address is None:
            then()
            return
        node = self.world.blobs_at(address)
        self.world.net.ask(
            self.node.name,
            node,
            lambda: node.keep_copy(self, blob),
            lambda _: self._acknowledged(node.name, blob, then, epoch),
            lambda why: self._due(epoch, self._buddy_lost, (why, blob, then)),
        )

    def _acknowledged(self, node: str, blob: Blob, then: Callable[[], None], epoch: int) -> None:
        self.world.checker.acknowledged(node, self.rank, blob[0])
        self._due(epoch, then, ())

    def _buddy_lost(self, why: str, blob: Blob, then: Callable[[], None]) -> None:
        self.say(m.BuddyLost(generation=self.generation, error=why))
        self.hold, self.asked_ns = True, self.world.now
        self.after(SECOND, self._put, blob, self._published(then), self.epoch)

    def _published(self, then: Callable[[], None]) -> Callable[[], None]:
        def go_on() -> None:
            self.hold, self.asked_ns = False, 0
            then()

        return go_on

    def _enter_fence(self) -> None:
        self.go("fence")
        self.fence_ns = self.world.now
        self.marks += 1
        self.in_fence = True
        held = self.hold_generation
        settled = self.version + training.is_step(self.tick) >= 2
        word = held if held >= 0 and settled else -1
        assert self.group is not None
        value = training.contribution(self.shared, self.own, self.tick, self.rank)
        self.group.enter(self, value, word, self.snapshot_asked if settled else -1)

    def fence_passed(self, group: Group, tick: int) -> None:
        if self.mode == "fence" and self.tick == tick and self.group is group:
            self._due(self.epoch, self._passed, (group, tick))

    def _passed(self, group: Group, tick: int) -> None:
        self.doubt(tick, lambda: self._go_on(group, tick))

    def _go_on(self, group: Group, tick: int) -> None:
        values = group.complete(tick)
        assert values is not None
        shared = training.next_shared(self.shared, tick, values)
        word, number = group.hold_word(tick), group.snapshot_word(tick)
        if self.world.random.random() < 0.1:  # an update that takes its time
            self.go("apply")
            self.after(self.world.random.randrange(20 * MS), self._apply, shared, word, number)
        else:
            self._apply(shared, word, number)

    def _apply(self, shared: int, word: int, number: int = -1) -> None:
        self.in_fence = False
        self.computing = False
        self.own = training.next_own(self.own, self.tick, self.rank)
        self.apply_to_shard()
        self.version += training.is_step(self.tick)
        self.tick += 1
        self.shared = shared
        self.marks += 1
        self.tick_marks = self.marks
        self.commit_ns = self.world.now
        self.world.checker.committed(self)
        if self.resumed == self.generation:
            self.resumed = -1
            self.say(_resumed(self))
        if self.owed >= 0:
            generation, self.owed = self.owed, -1
            self._hold(generation)
        elif word >= 0:
            self._hold(word)
        else:
            if number > self.snapshot:
                self.take_part(number)
            self._begin()

    def connection_lost(self, group: Group) -> None:
        if self.group is group:
            self.thread(self._connection_lost, group)

    def _connection_lost(self, group: Group) -> None:
        if self.group is not group or self.hung:
            return
        group.left.add(-1)  # whatever is entered from now on fails
        if self.mode == "fence":
            self._interrupted("comm", True)

    # ------------------------------------------------------------------ recovery

    def _interrupted(self, kind: str, in_fence: bool) -> None:
        self.in_fence = in_fence
        self.error_kind = kind
        if self.aborted():
            self._report()
        elif kind == "comm":
            self.go("grace")
            self.after(200 * MS, self._announce)
        else:
            self._announce()

    def _announce(self) -> None:
        self.go("failing")
        self.hold, self.asked_ns = True, self.world.now
        self.after(5 * SECOND, self._announce)
        kind: Any = self.error_kind
        self.say(
            m.Failure(
                generation=self.generation,
                error_kind=kind,
                error=f"RuntimeError: {kind}",
                version=self.version,
            )
        )
        if self.aborted():
            self._report()

    def _report(self) -> None:
        if self.hung:
            return
        self.leave_group()
        self.hold, self.asked_ns = True, 0
        self.report_generation = self.abort_generation
        self.go("deciding")
        kind: Any = self.error_kind
        self.say(
            m.Report(
                generation=self.abort_generation,
                tick=self.tick,
                version=self.version,
                in_fence=self.in_fence,
                computing=self.computing,
                error_kind=kind,
                error=f"RuntimeError: {kind}" if kind else "",
                done=self.done,
            )
        )
        self.pump()

    def _decided(self, tick: int) -> None:
        generation = self.report_generation
        if tick == self.tick + 1 and self.in_fence:
            values = self.group.complete(self.tick) if self.group is not None else None
            if values is None:
                self.crash(f"told to apply tick {self.tick}, whose collective never completed")
                return
            self.owed = generation
            self.hold = False
            self.go("apply")
            shared = training.next_shared(self.shared, self.tick, values)
            self.after(5 * MS, self._apply, shared, -1)
            return
        if tick != self.tick:
            self.crash(f"at tick {self.tick} told to go to {tick}")
            return
        self.in_fence = False
        self.go("apply")
        self.after(5 * MS + self.world.random.randrange(20 * MS), self._hold, generation)

    def _hold(self, generation: int) -> None:
        self.computing = False
        self.go("held")
        self.hold = True
        self.held_generation = generation
        self.say(
            m.Held(
                generation=generation,
                tick=self.tick,
                version=self.version,
                serve=m.Address(self.id, generation),
                pid=self.pid,
                done=self.done,
            )
        )
        self.pump()

    def _swap(self, command: m.Swap) -> None:
        self.hold = False
        if not command.solo and not self.done:
            group, self.staged = self.staged, None
            if group is None or group.generation != command.generation:
                if self.abort_generation <= command.generation:
                    self.crash(f"no groups are staged for generation {command.generation}")
                    return
                group = None
            self.leave_group()
            self.group = group
        self.alone = command.solo
        if command.generation < self.generation:
            self.world.checker.violated(f"{self.id} goes back to {command.generation}")
        self.generation = self.resumed = command.generation
        if self.hold_generation <= command.generation:
            self.hold_generation = -1
        self.snapshot_asked = -1
        if not command.same_buddy:
            self.buddy, self.parity = command.buddy, command.parity
        self.error_kind = ""
        self.stepping = True
        self.tick_marks = self.marks
        self.world.checker.swapped(self)
        self.say(m.Swapped(generation=command.generation, swap_ns=1))
        blob = (self.tick, self.version, self.own)
        self.connect_shard()
        if self.done or self.aborted():
            self._begin()
        else:
            self.node.publish(self, blob)
            self._publish(blob, self._begin)

    def _pump_deciding(self) -> None:
        command = self._find((m.Decide, m.Leave, m.Finish), self.report_generation)
        if isinstance(command, m.Decide):
            self._decided(command.tick)
        elif command is not None:
            self.exit(0)
        elif self.abort_generation > self.report_generation:
            self._report()

    def _pump_held(self) -> None:
        kinds = (m.Swap, m.Release, m.Leave, m.Checkpoint, m.Finish)
        while self.mode == "held" and self.alive:
            command = self._find(kinds, self.held_generation)
            if command is None:
                break
            if isinstance(command, m.Checkpoint):
                self.world.after(SECOND, self.thread, self._checkpointed, command)
            elif isinstance(command, m.Swap):
                self._swap(command)
                return
            elif isinstance(command, m.Release):
                self.hold = False
                if self.staged is not None and self.staged.generation <= command.generation:
                    self.staged = None
                self._begin()
                return
            else:
                self.exit(0)
                return
        if self.mode == "held" and self.abort_generation > self.held_generation:
            self.error_kind = ""
            self._report()

    def _checkpointed(self, command: m.Checkpoint) -> None:
        if self.mode == "held" and self.held_generation == command.generation:
            generation, path = command.generation, command.path
            if self.node.disk == "full":
                error = "No space left on device"
                self.say(m.CheckpointFailed(generation=generation, path=path, error=error))
            if self.node.disk:
                return
            self.say(m.Checkpointed(generation=generation, path=command.path, bytes_written=1))

    def _pump_done(self) -> None:
        command = self._find((m.Finish, m.Leave))
        if command is not None:
            self.exit(0)
        elif self.aborted():
            self._interrupted("", False)


def attached(rank: Member, generation: int) -> m.Attached:
    members = {"0": list(range(rank.world.plan.ranks))}
    if rank.odd_groups:
        members["1"] = [rank.rank, (rank.rank + 1) % rank.world.plan.ranks]
    return m.Attached(
        generation=generation,
        groups=sorted(members),
        parameters=1,
        bytes_state=8,
        redundant=True,
        kept_bytes=8 * rank.has_shard,
        members=members,
    )


def _resumed(rank: Member) -> m.Resumed:
    return m.Resumed(
        generation=rank.generation,
        tick=rank.tick,
        version=rank.version,
        last_commit_ns=0,
        first_commit_ns=rank.world.now,
        median_step_ns=rank.world.plan.step_ns,
    )
