"""A worker for the tests of the core: it does at once what the protocol of core/rank asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.core.rank import asks
from keepstep.core.rank.inbox import Inbox
from keepstep.core.rank.joining import Joining, park
from keepstep.core.rank.recovering import Recovering
from keepstep.model import commands
from keepstep.model import messages as m

SERVE = m.Address("10.0.0.1", 5000)


@dataclass
class FakeWorker:
    id: str
    node: str
    slot: int
    rank: int
    generation: int
    state: str = "starting"  # starting parked joining running aborted held done
    tick: int = 0
    in_fence: bool = False
    computing: bool = True
    error_kind: Any = ""
    error: str = ""
    alive: bool = True
    presumed: bool = False  # its agent does not know its rank
    mute: bool = False  # stopped: takes commands, answers nothing
    left: bool = False  # it was told to

    def __post_init__(self) -> None:
        self.inbox = Inbox()
        self._recovering = Recovering(self, self.inbox)
        self._protocol: asks.Protocol[Any] | None = None
        self._then: Callable[[Any], None] = lambda _: None
        self._awaited: asks.Await | None = None
        self._answers: list[m.WorkerMessage] = []

    @property
    def version(self) -> int:
        return self.tick

    @property
    def done(self) -> bool:
        return self.state == "done"

    def park(self) -> list[m.WorkerMessage]:
        self.state = "parked"
        self._run(park(self.inbox, m.Parked(where="train.py:7", warm_ns=1)), self._assigned)
        return self._said()

    def hears(self, command: commands.WorkerCommand) -> list[m.WorkerMessage]:
        """What it answers, in order."""
        if isinstance(command, commands.Assign):
            self.presumed = command.presumed
        verdict, answer = self.inbox.take(command, self.state == "held")
        if answer is not None:
            return [answer]
        assert verdict != "wrong", f"{command} to {self}"
        if isinstance(command, commands.Stage):
            self._say(m.Staged(generation=command.generation))
        elif isinstance(command, commands.Abort) and self.state in ("running", "done"):
            self._interrupted()
        elif self._awaited is not None:
            self._look()
        elif isinstance(command, commands.Hold) and self.state in ("running", "done"):
            self.tick, self.in_fence = self.tick + self.in_fence, False  # behind a fence
            self._hold(command.generation)
        elif isinstance(command, commands.Leave | commands.Finish):
            self.left = True
        return self._said()

    def _said(self) -> list[m.WorkerMessage]:
        said, self._answers = self._answers, []
        return said

    def _say(self, message: m.WorkerMessage) -> None:
        self.inbox.said(message)
        self._answers.append(message)

    # ------------------------------------------------------------------ protocol

    def _assigned(self, command: commands.Assign) -> None:
        self.rank, self.state = command.rank, "joining"
        joining = Joining(self.inbox, command)
        ready = m.Ready(generation=command.generation, arrived_ns=2_000_000, warm_ns=3_000_000)

        def positioned(_: commands.Position) -> None:
            self._run(joining.ready(ready), lambda _: self._run(joining.enter(), self._swap))

        self._run(joining.arrive(), positioned)

    def _swap(self, command: commands.Swap) -> None:
        self._run(self._recovering.swap(command), lambda _: None)

    def _interrupted(self) -> None:
        self.state = "done" if self.done else "aborted"
        protocol = self._recovering.interrupted(
            self.error_kind, self.error, in_fence=self.in_fence, computing=self.computing
        )
        self._run(protocol, self._decided)

    def _decided(self, verdict: str) -> None:
        if verdict == "COMMIT":
            self.tick, self.in_fence = self.tick + 1, False
            self._hold(self._recovering.pay())

    def _hold(self, generation: int) -> None:
        self._run(self._recovering.hold(generation), lambda _: self._trains())

    def _trains(self) -> None:
        """To its next fence, with the word of a Hold that came while it held for another."""
        if self.inbox.hold_generation >= 0:
            self._hold(self.inbox.hold_generation)

    def _run(self, protocol: asks.Protocol[Any], then: Callable[[Any], None]) -> None:
        self._protocol, self._then = protocol, then
        self._go_on(None)

    def _go_on(self, answer: Any) -> None:
        protocol, self._awaited = self._protocol, None
        assert protocol is not None
        while not self.left:
            try:
                ask = protocol.send(answer)
            except StopIteration as end:
                self._then(end.value)
                return
            if isinstance(ask, asks.Await):
                self._awaited = ask
                self._look()
                return
            answer = self._perform(ask)

    def _look(self) -> None:
        ask = self._awaited
        assert ask is not None
        command = self.inbox.pop(ask.accept)
        newer_than = ask.newer_than
        if command is not None or (newer_than is not None and self.inbox.aborted(newer_than)):
            self._go_on(command)

    def _perform(self, ask: asks.Ask) -> Any:
        match ask:
            case asks.Say():
                self._say(ask.message)
                if isinstance(ask.message, m.Swapped):
                    self._answers.append(self._behind(ask.message))
            case asks.RollBack():
                self.in_fence = False
            case asks.Serve():
                return self._held(ask.generation)
            case asks.StopServing():
                self.state = "running" if self.state == "held" else self.state
            case asks.Write():
                generation, path = ask.command.generation, ask.command.path
                return m.Checkpointed(generation=generation, path=path, bytes_written=1)
            case asks.Enter():
                self._newcomer = self.state == "joining"
                self.state = "done" if ask.command.solo else "running"
                self.generation, self.error_kind = ask.command.generation, ""
                return asks.Entered(True, 5_000_000)
            case asks.Take():
                return self._copied(ask.command)
            case asks.LeaveJob():
                self.left = True
        return None

    def _held(self, generation: int) -> m.Held:
        done = self.done
        self.state = "done" if done else "held"
        tick = self.tick
        return m.Held(generation=generation, tick=tick, version=tick, serve=SERVE, pid=9, done=done)

    def _copied(self, copy: commands.Copy) -> m.Copied:
        assert copy.checkpoint or copy.sources
        tick = int(copy.checkpoint.rsplit("-", 1)[1]) if copy.checkpoint else max(0, copy.tick)
        self.tick = tick
        return m.Copied(
            generation=copy.generation,
            tick=copy.tick,
            bytes_copied=1,
            copy_ns=4_000_000,
            sources=[source.rank for source in copy.sources],
            side_state="checkpoint" if copy.checkpoint else "own-agent",
        )

    def _behind(self, swapped: m.Swapped) -> m.WorkerMessage:
        """Its first commit behind the swap, or its end."""
        if self.done:
            return m.Done(tick=self.tick, version=self.tick)
        return m.Resumed(
            generation=swapped.generation,
            tick=self.tick,
            version=self.tick,
            last_commit_ns=0 if self._newcomer else 100_000_000,
            first_commit_ns=900_000_000,
            median_step_ns=50_000_000,
            abort_ns=1_000_000,
        )
