"""What has come from the agent, until the main thread of a rank asks for it.

A command may be sent again because its answer was lost with a stream. If it was answered for the
same generation, the answer is said again and the command is done with. Commands of a generation
older than the newest Abort are dropped, so nobody behind has to think about them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from keepstep.model import commands
from keepstep.model import messages as m

# command -> answer, of the same generation
ANSWERS: Final[dict[type[m.Message], type[m.Message]]] = {
    commands.Abort: m.Report,
    commands.Decide: m.Held,
    commands.Hold: m.Held,
    commands.Stage: m.Staged,
    commands.Copy: m.Copied,
    commands.Swap: m.Swapped,
}
# A newcomer does these once in its life, whatever the generation.
ANSWERED_ONCE: Final[dict[type[m.Message], type[m.Message]]] = {
    commands.Assign: m.Arrived,
    commands.Position: m.Ready,
}
# Facts and not requests: they are obeyed even if an Abort comes right behind them.
FACTS: Final = (commands.Swap, commands.Assign, commands.Position, commands.Leave)
# They must not wait for the main thread.
AT_ONCE: Final = (commands.Abort, commands.Stage, commands.Seal, commands.Inspect, commands.Arm)


class Taken(NamedTuple):
    """What is to be done with a command that has come.

    kept    nothing: the main thread may look
    now     it is done at once, beside the main thread
    again   `answer` is said once more
    stale   nothing
    wrong   the process must end: it has another rank already
    """

    verdict: Literal["kept", "now", "again", "stale", "wrong"]
    answer: m.WorkerMessage | None = None


class Inbox:
    def __init__(self, rank: int = -1) -> None:
        self.rank = rank  # that its process has or was given; -1: none
        self.abort_generation = -1  # newest Abort seen
        self.hold_generation = -1  # newest Hold that is neither released nor aborted
        self.snapshot = -1  # number of the checkpoint to raise the word for
        self.buddy: m.Address | None = None
        self.buddy_known = False
        self.parity: commands.Parity | None = None
        # The newest, until groups for what follows are asked for.
        self._abort: commands.Abort | None = None
        self.waiting: list[commands.WorkerCommand] = []
        self._answers: dict[type[m.Message], m.WorkerMessage] = {}

    # ------------------------------------------------------------------ what comes

    def take(self, command: commands.WorkerCommand, holds: bool) -> Taken:
        """`holds`: this rank does nothing but wait for commands."""
        generation = _generation(command)
        if 0 <= generation < self.abort_generation:
            return Taken("stale")
        if isinstance(command, commands.Assign):
            if self.rank not in (-1, command.rank):
                return Taken("wrong")
            self.rank = command.rank
        answer = self._answered(command, generation, holds)
        if answer is not None:
            if isinstance(command, commands.Swap):
                self._take_buddy(command)  # it may be another one than in the first Swap
            return Taken("again", answer)
        if isinstance(command, commands.Abort):
            self._aborts(command)
        elif isinstance(command, commands.Stage):
            self._abort = None
        if isinstance(command, AT_ONCE):
            return Taken("now")
        self._keep(command)
        return Taken("kept")

    def _answered(
        self, command: commands.WorkerCommand, generation: int, holds: bool
    ) -> m.WorkerMessage | None:
        kind = type(command)
        if kind in ANSWERED_ONCE:
            return self._answers.get(ANSWERED_ONCE[kind])
        if isinstance(command, commands.Snapshot):
            saved = self._answers.get(m.Saved)
            same = isinstance(saved, m.Saved) and saved.number == command.number
            return saved if same else None
        answer = self._answers.get(ANSWERS[kind]) if kind in ANSWERS else None
        if answer is None or getattr(answer, "generation", None) != generation:
            return None
        # A rank that was released does not hold any more; then the Hold is a new one.
        return answer if kind is not commands.Hold or holds else None

    def _aborts(self, command: commands.Abort) -> None:
        self.abort_generation = command.generation
        self.hold_generation = self.snapshot = -1
        self.waiting = [one for one in self.waiting if not self._stale(one)]
        self._abort = command

    def _stale(self, command: commands.WorkerCommand) -> bool:
        generation: int | None = getattr(command, "generation", None)
        old = generation is not None and generation < self.abort_generation
        return old and not isinstance(command, FACTS)

    def _keep(self, command: commands.WorkerCommand) -> None:
        match command:
            case commands.Hold():
                self.hold_generation = command.generation
            case commands.Snapshot():
                self.snapshot = command.number
            case commands.Buddy():
                self.buddy, self.parity = command.address, command.parity
                self.buddy_known = True
            case commands.Release():
                if self.hold_generation <= command.generation:
                    self.hold_generation = -1
                self.waiting.append(command)
            case commands.Swap():
                # Said again, it replaces the first: its buddy may be another one.
                same = command.generation
                self.waiting = [
                    one
                    for one in self.waiting
                    if not (isinstance(one, commands.Swap) and one.generation == same)
                ]
                self.waiting.append(command)
            case _:
                self.waiting.append(command)

    # ------------------------------------------------------------------ what the rank does

    def said(self, message: m.WorkerMessage) -> None:
        self._answers[type(message)] = message

    def unreported(self) -> commands.Abort | None:
        """The newest Abort, until a Report has answered it."""
        report = self._answers.get(m.Report)
        if self._abort is None or not isinstance(report, m.Report):
            return self._abort
        return self._abort if report.generation < self._abort.generation else None

    def answer(self, kind: type[m.Message]) -> m.WorkerMessage | None:
        """The last message of this kind that was said."""
        return self._answers.get(kind)

    def aborted(self, generation: int) -> bool:
        return self.abort_generation > generation

    def pop(
        self, accept: Callable[[commands.WorkerCommand], bool]
    ) -> commands.WorkerCommand | None:
        for index, command in enumerate(self.waiting):
            if accept(command):
                del self.waiting[index]
                return command
        return None

    def assigned(self, command: commands.Assign) -> None:
        """The main thread takes the rank that it was given, or another time the same one."""
        if not self.buddy_known:
            self.buddy = command.buddy

    def swapped(self, command: commands.Swap) -> None:
        """The rank is in a new generation: what was asked for before was dropped with the old."""
        if self.hold_generation <= command.generation:
            self.hold_generation = -1
        self.snapshot = -1
        self._take_buddy(command)

    def _take_buddy(self, command: commands.Swap) -> None:
        if not command.same_buddy:
            self.buddy, self.parity = command.buddy, command.parity


def _generation(command: Any) -> int:
    generation: int = getattr(command, "generation", -1)
    return generation
