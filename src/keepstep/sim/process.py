"""A simulated worker process: threads, inbox and page, without what it is for.

The daemon thread is `take`. The main thread is `mode` with the timers of its epoch, and now and
then it is in a protocol of core/rank: `run` begins one, `perform` does what it asks for, at once or
over time, and `pump` looks into the inbox for the command that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keepstep.core.rank import asks
from keepstep.core.rank.inbox import Inbox
from keepstep.core.rank.recovering import Recovering
from keepstep.core.rank.staging import Staging
from keepstep.errors import LocalProtocolError
from keepstep.model import messages as m
from keepstep.model.page import NEWEST, Sample
from keepstep.sim import training
from keepstep.sim.groups import Group
from keepstep.sim.net import SECOND
from keepstep.sim.pace import OwnTime

if TYPE_CHECKING:
    from keepstep.sim.node import SimNode
    from keepstep.sim.world import World

Blob = tuple[int, int, int]  # tick, version, own

ECHOED = (m.Staged, m.StageFailed, m.Copied, m.Report, m.Held)
WHERE = {
    "init": "starting",
    "construct": "starting",
    "publish": "fence",
    "grace": "fence",
    "failing": "fence",
    "deciding": "fence",
    "arrived": "building",
    "warming": "building",
    "joining": "held",
    "copying": "held",
    "swapping": "held",
}


class Pending:
    """What is asked for takes time; `reply` brings the answer."""


PENDING = Pending()


class Process:
    def __init__(self, world: World, node: SimNode, start: m.StartWorker, pid: int) -> None:
        self.world = world
        self.node = node
        self.id = start.worker
        self.slot = start.slot
        self.rank = start.rank
        self.pid = pid
        # process
        self.alive = True
        self.stopped = False
        self.stopped_at = 0
        self.was_stopped = False
        self.hung = False
        self.slow = 1
        self.was_slow = False
        self.error = ""  # to be raised in the next computation: "device" or "user"
        self.mode = "starting"
        self.epoch = 0
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        # protocol
        self.inbox = Inbox(start.rank)
        self.inbox.buddy, self.inbox.parity = start.buddy, start.parity
        self.staging: Staging[Group] = Staging()
        self.recovering = Recovering(self, self.inbox)
        self._protocol: asks.Protocol[Any] | None = None
        self._then: Callable[[Any], None] = lambda _: None
        self._awaited: asks.Await | None = None
        # seat
        self.tick = self.version = 0
        self.generation = start.generation if start.rank >= 0 else 0
        self.shared = training.first_shared()
        self.own = training.first_own(start.rank)
        self.shard = training.first_shard(start.rank)
        self.group: Group | None = None
        self.odd_groups = False
        self.builder_stuck = False  # its next groups are never finished
        self.in_fence = False
        self.fence_ns = 0  # since when it waits in it
        self.snapshot = -1  # number of the last one taken
        self.saving = False
        self.alone = False
        self.done = False
        self.finished_script = False
        self.resumed = -1
        self.findings = 0  # of its witness
        self.report_generation = -1
        self.held_generation = -1
        self.copy: m.Copy | None = None
        self.error_kind = ""
        self.computing = False
        # page
        self.marks = self.tick_marks = 0
        self.stepping = False
        self.hold = False
        self.asked_ns = 0
        self.commit_ns = 0
        self.pace = OwnTime()
        self.master = start.master
        wait = SECOND // 2 + world.random.randrange(SECOND)
        self.after(wait, self._started)

    # ------------------------------------------------------------------ process

    def after(self, ns: int, work: Callable[..., None], *args: Any) -> None:
        """Main thread: void when it has gone on to something else."""
        self.world.after(ns * self.slow, self._due, self.epoch, work, args)

    def _due(self, epoch: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or epoch != self.epoch or self.hung:
            return
        if self.stopped:
            self.backlog.append((self._due, (epoch, work, args)))
        else:
            work(*args)

    def thread(self, work: Callable[..., None], *args: Any) -> None:
        """Another thread of the process, now."""
        if not self.alive:
            return
        if self.stopped:
            self.backlog.append((self.thread, (work, *args)))
        else:
            work(*args)

    def go(self, mode: str) -> None:
        self.mode = mode
        self.epoch += 1

    def say(self, message: m.WorkerMessage) -> None:
        self.inbox.said(message)
        self.node.said(self, message)

    def _echo(self) -> None:
        """What it answered in older attempts once more, late: as if that had been on its way."""
        for kind in ECHOED:
            answer = self.inbox.answer(kind)
            if answer is not None:
                wait = self.world.random.randrange(3 * SECOND)
                self.world.after(wait, self._repeat, answer)

    def _repeat(self, answer: Any) -> None:
        if self.alive and not self.stopped:
            self.node.said(self, answer)

    def stop(self) -> None:
        if self.alive and not self.stopped:
            self.stopped, self.stopped_at = True, self.world.now
            self.was_stopped = True

    def resume(self) -> None:
        if self.stopped:
            self.stopped = False
            backlog, self.backlog = self.backlog, []
            for work, args in backlog:
                work(*args)

    def exit(self, code: int, tail: str = "") -> None:
        if not self.alive:
            return
        self.alive = False
        self.leave_group()
        self.node.process_ended(self, code, tail)

    def crash(self, why: str) -> None:
        """The worker would raise LocalProtocolError: the protocol was broken."""
        self.world.checker.violated(f"{self.id} (rank {self.rank}) in {self.mode}: {why}")
        self.exit(1, why)

    def fail(self, kind: Any) -> None:
        """Its script raises before it takes part in anything, and ends."""
        error = f"RuntimeError: {kind}"
        self.say(m.Failure(generation=self.generation, error_kind=kind, error=error, version=0))
        self.exit(1, error)

    def sample(self) -> Sample | None:
        if self.mode == "starting":
            return None
        return Sample(
            heartbeat_ns=self.stopped_at if self.stopped else self.world.now,
            progress_ns=0,
            marks=self.marks,
            version=self.version,
            tick=self.tick,
            generation=self.generation,
            where=WHERE.get(self.mode, self.mode),
            stepping=self.stepping,
            commit_ns=self.commit_ns,
            step_ns=0,
            hold=self.hold,
            tick_marks=self.tick_marks,
            asked_ns=self.asked_ns,
            own_ns=self.pace.own_ns,
            own_steps=self.pace.steps,
        )

    def _started(self) -> None:
        raise NotImplementedError

    def leave_group(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ daemon thread

    def take(self, command: m.WorkerCommand) -> None:
        before = self.inbox.abort_generation
        verdict, answer = self.inbox.take(command, self.hold)
        if answer is not None:
            self.node.said(self, answer)
        elif verdict == "wrong":
            self.exit(1)
        elif verdict == "kept":
            self.pump()
        elif verdict == "now":
            if self.world.echoes and self.inbox.abort_generation > before:
                self._echo()
            self._do_at_once(command)

    def _do_at_once(self, command: m.WorkerCommand) -> None:
        raise NotImplementedError

    def aborted(self) -> bool:
        return self.inbox.aborted(self.generation)

    # ------------------------------------------------------------------ protocol

    def run(
        self, protocol: asks.Protocol[Any], then: Callable[[Any], None] = lambda _: None
    ) -> None:
        """From here on the main thread is in this protocol, until `then` gets what it returns."""
        self._protocol, self._then, self._awaited = protocol, then, None
        self.reply(None)

    def reply(self, answer: Any = None) -> None:
        protocol, self._awaited = self._protocol, None
        assert protocol is not None
        while self.alive:
            try:
                ask = protocol.send(answer)
            except StopIteration as end:
                self._protocol = None
                self._then(end.value)
                return
            except LocalProtocolError as error:
                self.crash(str(error))
                return
            if isinstance(ask, asks.Await):
                self._awaited = ask
                if ask.seconds is not None:
                    self.after(int(ask.seconds * SECOND), self._waited, ask)
                self.pump()
                return
            answer = self.perform(ask)
            if answer is PENDING:
                return

    def perform(self, ask: asks.Ask) -> Any:
        raise NotImplementedError

    def pump(self) -> None:
        ask = self._awaited
        if not self.alive or self.hung or ask is None:
            return
        command = self.inbox.pop(ask.accept)
        newer_than = ask.newer_than
        if command is not None or (newer_than is not None and self.inbox.aborted(newer_than)):
            self.reply(command)

    def _waited(self, ask: asks.Await) -> None:
        if self._awaited is ask:
            self.reply(None)

    @property
    def in_protocol(self) -> bool:
        return self._protocol is not None

    # ------------------------------------------------------------------ what others look at

    @property
    def buddy(self) -> m.Address | None:
        return self.inbox.buddy

    @property
    def parity(self) -> m.Parity | None:
        return self.inbox.parity

    @property
    def staged(self) -> Group | None:
        return self.staging.ready


def newest(blobs: list[Blob], tick: int) -> Blob | None:
    if tick == NEWEST:
        return max(blobs, default=None)
    return next((blob for blob in blobs if blob[0] == tick), None)
