"""A process that has a rank: its groups, its transactions, its part in a recovery.

Its recovery is the one of core/rank. A mode:

    init compute publish fence diverged apply | grace failing deciding held | done
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.core.rank import asks
from keepstep.model import messages as m
from keepstep.sim import training
from keepstep.sim.groups import Group
from keepstep.sim.net import MS, SECOND
from keepstep.sim.process import PENDING, Blob
from keepstep.sim.witness import Doubter


class Member(Doubter):
    # ------------------------------------------------------------------ groups

    def _do_at_once(self, command: m.WorkerCommand) -> None:
        if isinstance(command, m.Abort):
            self._on_abort()
        elif isinstance(command, m.Seal):
            self.seal(command)
        elif isinstance(command, m.Stage) and self.staging.begin(command.generation):
            self._meet(command.generation, command.store)

    def _on_abort(self) -> None:
        self._drop_staged(self.inbox.abort_generation)
        if self.rank < 0 or self.mode in ("starting", "init"):
            return
        if self.aborted():
            self.leave_group()
        if not self.hung:
            self._notice_abort()

    def _notice_abort(self) -> None:
        """What the main thread waits for fails, or is taken as a reason to stop waiting."""
        if self.mode not in ("publish", "fence"):
            self.pump()
        elif self.in_protocol:  # it publishes again, behind a swap
            self.go("held")
            self.reply()
        else:
            self._interrupted("comm", self.mode == "fence")

    def _drop_staged(self, below: int) -> None:
        group = self.staging.drop(below)
        if group is not None:
            group.leave(self)

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
        elif not self.inbox.aborted(generation):
            store.meet(self)

    def stage_failed(self, generation: int, why: str) -> None:
        self.thread(self._stage_failed, generation, why)

    def _stage_failed(self, generation: int, why: str) -> None:
        if self.mode == "init":
            self.exit(1, f"RuntimeError: no process group: {why}")
        elif self.staging.failed(generation, self.inbox.abort_generation):
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
        else:
            self._built(generation, group)

    def _built(self, generation: int, group: Group) -> None:
        kept, useless = self.staging.built(generation, group, self.inbox.abort_generation)
        if useless is not None:
            useless.leave(self)
        if kept and self.builder_stuck:
            self.builder_stuck = False
            self.staging.take(generation)
        elif kept:
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
            self.run(self.recovering.linger(), lambda _: self.exit(0))
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
        held = self.inbox.hold_generation
        settled = self.version + training.is_step(self.tick) >= 2
        word = held if held >= 0 and settled else -1
        assert self.group is not None
        value = training.contribution(self.shared, self.own, self.tick, self.rank)
        self.group.enter(self, value, word, self.inbox.snapshot if settled else -1)

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
        if self.recovering.owes:
            self._hold(self.recovering.pay())
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

    def _interrupted(self, kind: Any, in_fence: bool) -> None:
        self.in_fence = in_fence
        self.error_kind = kind
        if not self.aborted():
            self.go("grace" if kind == "comm" else "failing")
        error = f"RuntimeError: {kind}" if kind else ""
        protocol = self.recovering.interrupted(
            kind, error, in_fence=in_fence, computing=self.computing
        )
        self.run(protocol, self._decided)

    def _decided(self, verdict: str) -> None:
        if verdict == "RETRY":
            self._begin()
            return
        values = self.group.complete(self.tick) if self.group is not None else None
        if values is None:
            self.crash(f"told to apply tick {self.tick}, whose collective never completed")
            return
        self.go("apply")
        shared = training.next_shared(self.shared, self.tick, values)
        self.after(5 * MS, self._apply, shared, -1)

    def _hold(self, generation: int) -> None:
        self.run(self.recovering.hold(generation), lambda _: self._begin())

    def perform(self, ask: asks.Ask) -> Any:
        match ask:
            case asks.Say():
                self._show(ask.message)
                self.say(ask.message)
            case asks.ShowWaiting():
                self.hold, self.asked_ns = True, self.world.now if ask.asking else 0
            case asks.ShowBusy():
                self.hold, self.asked_ns = False, 0
            case asks.LeaveGroups():
                self.leave_group()
            case asks.RollBack():
                self.in_fence = False
                self.go("apply")
                self.after(5 * MS + self.world.random.randrange(20 * MS), self.reply)
                return PENDING
            case asks.Serve():
                return self._serve(ask.generation)
            case asks.StopServing():
                self.hold = False
            case asks.Write():
                self.after(SECOND, self._written, ask.command)
                return PENDING
            case asks.Enter():
                return self._enter(ask.command)
            case asks.Republish():
                return self._republish()
            case asks.DropStaged():
                self._drop_staged(ask.below)
            case asks.Leave():
                self.exit(0)
        return None

    def _show(self, message: m.WorkerMessage) -> None:
        """The page has it before the agent hears of it."""
        match message:
            case m.Failure():
                self.go("failing")
            case m.Report():
                self.report_generation = message.generation
                self.go("deciding")
            case m.Done():
                self.go("done")

    def _serve(self, generation: int) -> m.Held:
        self.computing = False
        self.go("held")
        self.hold = True
        self.held_generation = generation
        return m.Held(
            generation=generation,
            tick=self.tick,
            version=self.version,
            serve=m.Address(self.id, generation),
            pid=self.pid,
            done=self.done,
        )

    def _written(self, command: m.Checkpoint) -> None:
        generation, path = command.generation, command.path
        if self.node.disk == "stuck":
            return  # a call that never comes back, whatever becomes of the disk
        if self.node.disk == "full":
            error = "No space left on device"
            self.reply(m.CheckpointFailed(generation=generation, path=path, error=error))
        else:
            self.reply(m.Checkpointed(generation=generation, path=path, bytes_written=1))

    def _enter(self, command: m.Swap) -> asks.Entered:
        staged = True
        if not command.solo and not self.done:
            group = self.staging.take(command.generation)
            staged = group is not None
            self.leave_group()
            self.group = group
        self.alone = command.solo
        if command.generation < self.generation:
            self.world.checker.violated(f"{self.id} goes back to {command.generation}")
        self.generation = self.resumed = command.generation
        self.error_kind = ""
        self.stepping = True
        self.tick_marks = self.marks
        self.world.checker.swapped(self)
        return asks.Entered(staged, 1)

    def _republish(self) -> Any:
        self.connect_shard()
        if self.aborted():
            return None
        blob = (self.tick, self.version, self.own)
        self.node.publish(self, blob)
        self._publish(blob, self.reply)
        return PENDING


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
