"""A simulated worker: inbox, page, and the protocol that it is in.

The daemon thread is `take`. The main thread is now and then in a protocol of core/rank: `run`
begins one, `perform` does what it asks for, at once or over time, and `pump` looks into the inbox
for the command that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from keepstep.core.rank import asks
from keepstep.core.rank.inbox import Inbox
from keepstep.core.rank.recovering import Recovering
from keepstep.core.rank.staging import Staging
from keepstep.errors import LocalProtocolError
from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from keepstep.model.page import Sample
from keepstep.sim.ground import training
from keepstep.sim.ground.groups import Group
from keepstep.sim.ground.violation import violated
from keepstep.sim.ground.world_view import HomeNode, SimSurroundings
from keepstep.sim.rank.pace import SimOwnTime
from keepstep.sim.rank.process import SimProcess
from keepstep.sim.times import SECOND

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


class PendingCommand:
    """What is asked for takes time; `reply` brings the answer."""


PENDING = PendingCommand()


@dataclass(slots=True)
class SharedPage:
    """What its agent sees of it without asking."""

    marks: int = 0
    tick_marks: int = 0
    stepping: bool = False
    hold: bool = False
    asked_ns: int = 0
    commit_ns: int = 0
    pace: SimOwnTime = field(default_factory=SimOwnTime)


class SimWorker(SimProcess):
    def __init__(
        self, world: SimSurroundings, node: HomeNode, start: agent_messages.StartWorker, pid: int
    ) -> None:
        super().__init__(world, node, start.worker, start.slot, pid)
        self.rank = start.rank
        self.master = start.master
        self.page = SharedPage()
        # what it has at a boundary
        self.tick = self.version = 0
        self.generation = start.generation if start.rank >= 0 else 0
        self.shared = training.first_shared()
        self.own = training.first_own(start.rank)
        self.shard = training.first_shard(start.rank)
        self.done = False
        # protocol
        self.inbox = Inbox(start.rank)
        self.inbox.buddy, self.inbox.parity = start.buddy, start.parity
        self.staging: Staging[Group] = Staging()
        self.recovering = Recovering(self, self.inbox)
        self._protocol: asks.Protocol[Any] | None = None
        self._then: Callable[[Any], None] = lambda _: None
        self._awaited: asks.Await | None = None
        wait = SECOND // 2 + world.random.randrange(SECOND)
        self.after(wait, self._started)

    def _started(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ what it says

    def say(self, message: m.WorkerMessage) -> None:
        self.inbox.said(message)
        self.node.said(self.id, message)

    def _echo(self) -> None:
        """What it answered in older attempts once more, late: as if that had been on its way."""
        for kind in ECHOED:
            answer = self.inbox.answer(kind)
            if answer is not None:
                wait = self.world.random.randrange(3 * SECOND)
                self.world.after(wait, self._repeat, answer)

    def _repeat(self, answer: Any) -> None:
        if self.alive and not self.stopped:
            self.node.said(self.id, answer)

    def crash(self, why: str) -> NoReturn:
        """The worker would raise LocalProtocolError: the protocol was broken."""
        violated(f"{self.id} (rank {self.rank}) in {self.mode}: {why}")

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
            marks=self.page.marks,
            version=self.version,
            tick=self.tick,
            generation=self.generation,
            where=WHERE.get(self.mode, self.mode),
            stepping=self.page.stepping,
            commit_ns=self.page.commit_ns,
            step_ns=0,
            hold=self.page.hold,
            tick_marks=self.page.tick_marks,
            asked_ns=self.page.asked_ns,
            own_ns=self.page.pace.own_ns,
            own_steps=self.page.pace.steps,
        )

    # ------------------------------------------------------------------ daemon thread

    def take(self, command: commands.WorkerCommand) -> None:
        before = self.inbox.abort_generation
        verdict, answer = self.inbox.take(command, self.page.hold)
        if answer is not None:
            self.node.said(self.id, answer)
        elif verdict == "wrong":
            self.exit(1)
        elif verdict == "kept":
            self.pump()
        elif verdict == "now":
            if self.world.ills.echoes and self.inbox.abort_generation > before:
                self._echo()
            self._do_at_once(command)

    def _do_at_once(self, command: commands.WorkerCommand) -> None:
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
    def parity(self) -> commands.Parity | None:
        return self.inbox.parity

    @property
    def staged(self) -> Group | None:
        return self.staging.ready
