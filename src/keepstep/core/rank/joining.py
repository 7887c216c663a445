"""A parked process is given a rank.

    Parked -> Assign     the rank whose place it takes
    Arrived -> Position  its script wants to know where the job is: where to enter it again
    Ready -> Copy        it is built and warm: the state to take, or another one after a failure
    Copied -> Swap       said at the entry of the transaction that comes next; from then on it is a
                         rank as any other
             a newer Abort: the attempt is over, and another Copy will come

In a worker these calls come out of the user's script, each when the script has got there.
"""

from __future__ import annotations

from keepstep.core.rank import asks
from keepstep.core.rank.asks import Protocol
from keepstep.core.rank.inbox import Inbox
from keepstep.model import commands
from keepstep.model import messages as m


def park(inbox: Inbox, parked: m.Parked) -> Protocol[commands.Assign]:
    yield asks.Say(parked)
    return (yield from assigned(inbox))


def assigned(inbox: Inbox) -> Protocol[commands.Assign]:
    """Also again, if nobody could say what the rank has been told before."""
    command = yield asks.Await(
        lambda c: isinstance(c, commands.Assign | commands.Finish | commands.Leave)
    )
    if not isinstance(command, commands.Assign):
        yield asks.LeaveJob()
    assert isinstance(command, commands.Assign)
    inbox.assigned(command)
    return command


class Joining:
    def __init__(self, inbox: Inbox, assign: commands.Assign) -> None:
        self._inbox = inbox
        self._assign = assign
        self._installed: tuple[commands.Copy, m.Copied] | None = None

    def arrive(self) -> Protocol[commands.Position]:
        yield asks.Say(m.Arrived(generation=self._assign.generation))
        command = yield asks.Await(
            lambda c: isinstance(c, commands.Position | commands.Finish | commands.Leave)
        )
        if not isinstance(command, commands.Position):
            yield asks.LeaveJob()
        assert isinstance(command, commands.Position)
        return command

    def ready(self, ready: m.Ready) -> Protocol[None]:
        """It is warm. Returns when state is installed."""
        yield asks.Say(ready)
        yield from self._install()

    def _install(self) -> Protocol[None]:
        """Again after a copy that failed, or after an Abort."""
        while self._installed is None:
            command = yield asks.Await(
                lambda c: isinstance(c, commands.Copy | commands.Finish | commands.Leave)
            )
            if not isinstance(command, commands.Copy):
                yield asks.LeaveJob()
            said = yield asks.Take(command)
            if isinstance(said, m.Copied):
                self._installed = command, said
            else:
                yield asks.Say(said)

    def enter(self) -> Protocol[commands.Swap]:
        """At the entry of the transaction that comes next, or at the script's end."""
        while True:
            yield from self._install()
            assert self._installed is not None
            copy, copied = self._installed
            self._installed = None
            failed = yield asks.Settle(copy)
            if failed is not None:
                yield asks.Say(failed)
                continue
            yield asks.Say(copied)
            generation = copy.generation

            def accept(command: commands.WorkerCommand, wanted: int = generation) -> bool:
                if isinstance(command, commands.Swap):
                    return command.generation == wanted
                return isinstance(command, commands.Finish | commands.Leave)

            command = yield asks.Await(accept, newer_than=generation)
            if isinstance(command, commands.Swap):
                return command
            if command is not None:
                yield asks.LeaveJob()
