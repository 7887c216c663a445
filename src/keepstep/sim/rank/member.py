"""A process that has a rank: its part in a recovery, which is the one of core/rank.

Modes besides those of its transactions: grace failing deciding held done
"""

from __future__ import annotations

from typing import Any

from keepstep.core.rank import asks
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.sim.ground import training
from keepstep.sim.ground.groups import Group
from keepstep.sim.ground.violation import ensure
from keepstep.sim.rank.stepper import Stepper
from keepstep.sim.rank.worker import PENDING
from keepstep.sim.times import MS, SECOND


class Member(Stepper):
    error_kind = ""
    report_generation = -1
    held_generation = -1

    # ------------------------------------------------------------------ aborts and losses

    def _do_at_once(self, command: commands.WorkerCommand) -> None:
        if isinstance(command, commands.Abort):
            self._on_abort()
        elif isinstance(command, commands.Seal):
            self.seal(command)
        elif isinstance(command, commands.Stage) and self.staging.begin(command.generation):
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
                self.page.hold, self.page.asked_ns = True, self.world.now if ask.asking else 0
            case asks.ShowBusy():
                self.page.hold, self.page.asked_ns = False, 0
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
                self.page.hold = False
            case asks.Write():
                self.after(SECOND, self._written, ask.command)
                return PENDING
            case asks.Enter():
                return self._enter(ask.command)
            case asks.Republish():
                return self._republish()
            case asks.DropStaged():
                self._drop_staged(ask.below)
            case asks.LeaveJob():
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
        self.page.hold = True
        self.held_generation = generation
        return m.Held(
            generation=generation,
            tick=self.tick,
            version=self.version,
            serve=m.Address(self.id, generation),
            pid=self.pid,
            done=self.done,
        )

    def _written(self, command: commands.Checkpoint) -> None:
        generation, path = command.generation, command.path
        if self.node.disk == "stuck":
            return  # a call that never comes back, whatever becomes of the disk
        if self.node.disk == "full":
            error = "No space left on device"
            self.reply(m.CheckpointFailed(generation=generation, path=path, error=error))
        else:
            self.reply(m.Checkpointed(generation=generation, path=path, bytes_written=1))

    def _enter(self, command: commands.Swap) -> asks.Entered:
        staged = True
        if not command.solo and not self.done:
            group = self.staging.take(command.generation)
            staged = group is not None
            self.leave_group()
            self.group = group
        self.alone = command.solo
        back = command.generation < self.generation
        ensure(not back, f"{self.id} goes back to {command.generation}")
        self.generation = self.resumed = command.generation
        self.error_kind = ""
        self.page.stepping = True
        self.page.tick_marks = self.page.marks
        self.world.rules.swapped(self.id)
        return asks.Entered(staged, 1)

    def _republish(self) -> Any:
        self.connect_shard()
        if self.aborted():
            return None
        blob = (self.tick, self.version, self.own)
        self.node.memory.publish(self.id, self.rank, blob)
        self._publish(blob, self.reply)
        return PENDING
