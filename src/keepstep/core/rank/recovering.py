"""What a rank does between an interruption and the first step of the next generation.

    interrupted            -> Report -> Decide -> (apply the step | roll back) -> Held
    hold word in the fence                                                      -> Held
    Held: serve state to newcomers, write a checkpoint if told so
        -> Swap: new groups in place, go on     -> Release: go on as before
        -> Leave: this process is no longer the rank
        -> a newer Abort: report again, from the boundary reached
    a witness finds that numbers differ -> Diverged -> Proceed: go on all the same
                                                    -> Abort, as anywhere else in a fence
    the script is over                  -> Done     -> Finish or Leave; an Abort, as above

Nothing of the old generation can touch memory once the groups are left, so roll-back comes after
it. A COMMIT decided while this rank waits in its fence makes a debt: the step is applied first, and
the hold follows at the next entry.
"""

from __future__ import annotations

import itertools
from typing import Final, Literal

import msgspec

from keepstep.core.rank import asks
from keepstep.core.rank.asks import Protocol, Standing
from keepstep.core.rank.inbox import Inbox
from keepstep.errors import LocalProtocolError
from keepstep.model import commands
from keepstep.model import messages as m

GRACE_S: Final = 0.2  # a peer's death breaks collectives a moment before the Abort comes
FAILURE_AGAIN_S: Final = 5.0  # it may be lost with the agent's stream
DIVERGED_AGAIN_S: Final = 5
TABLE_EVERY: Final = 12  # of what is said again: the table is large

Kind = Literal["", "comm", "device", "user"]
Verdict = Literal["RETRY", "COMMIT"]


class Recovering:
    def __init__(self, me: Standing, inbox: Inbox) -> None:
        self._me = me
        self._inbox = inbox
        self._owed: int | None = None

    # ------------------------------------------------------------------ interrupted

    @property
    def owes(self) -> bool:
        """COMMIT was decided, and the rank has not held for it yet."""
        return self._owed is not None

    def pay(self) -> int:
        """The transaction was applied: the generation to hold for at the next entry."""
        assert self._owed is not None
        generation, self._owed = self._owed, None
        return generation

    def interrupted(
        self, kind: Kind, error: str, *, in_fence: bool, computing: bool
    ) -> Protocol[Verdict]:
        """RETRY: everything is in place for the transaction to run (again). COMMIT: it is to be
        applied. `kind`: of the failure that has interrupted it; empty: an Abort has."""
        me, inbox = self._me, self._inbox
        if kind and not inbox.aborted(me.generation):
            yield from self._fail(kind, error)
        generation = inbox.abort_generation
        while True:
            # It does nothing more by itself: an agent that fences its node may spare it.
            yield asks.ShowWaiting()
            yield asks.LeaveGroups()
            yield asks.Say(
                m.Report(
                    generation=generation,
                    tick=me.tick,
                    version=me.version,
                    in_fence=in_fence,
                    computing=computing,
                    error_kind=kind,
                    error=error,
                    done=me.done,
                )
            )
            tick = yield from self._decision(generation)
            if tick is None:
                generation = inbox.abort_generation
                continue
            if tick == me.tick + 1 and in_fence:
                yield asks.ShowBusy()
                self._owed = generation
                return "COMMIT"
            if tick != me.tick:
                raise LocalProtocolError(f"at tick {me.tick} told to go to {tick}")
            in_fence = False
            yield asks.RollBack()
            newer = yield from self._hold(generation)
            if newer is None:
                return "RETRY"
            generation, kind, error = newer, "", ""

    def _fail(self, kind: Literal["comm", "device", "user"], error: str) -> Protocol[None]:
        """Until an Abort answers it."""
        me, inbox = self._me, self._inbox
        if kind == "comm":
            yield asks.Await(_nothing, newer_than=me.generation, seconds=GRACE_S)
        while not inbox.aborted(me.generation):
            yield asks.ShowWaiting(asking=True)
            yield asks.Say(
                m.Failure(
                    generation=me.generation, error_kind=kind, error=error, version=me.version
                )
            )
            yield asks.Await(_nothing, newer_than=me.generation, seconds=FAILURE_AGAIN_S)

    def _decision(self, generation: int) -> Protocol[int | None]:
        """None: a newer Abort has come."""

        def accept(command: commands.WorkerCommand) -> bool:
            if isinstance(command, commands.Decide | commands.Leave):
                return command.generation == generation
            return isinstance(command, commands.Finish)

        command = yield asks.Await(accept, newer_than=generation)
        if isinstance(command, commands.Leave | commands.Finish):
            yield asks.LeaveJob()
        return command.tick if isinstance(command, commands.Decide) else None

    # ------------------------------------------------------------------ holding

    def hold(self, generation: int) -> Protocol[None]:
        """At the boundary now reached. Planned: the hold word was in the last fence; if it came
        from a peer, our own copy of Hold is on its way, or its Release is here already and ends
        this at once. Unplanned: the last transaction was applied because of COMMIT."""
        newer = yield from self._hold(generation)
        if newer is not None:
            yield from self.interrupted("", "", in_fence=False, computing=False)

    def _hold(self, generation: int) -> Protocol[int | None]:
        """None: go on training. A number: a newer Abort has come, report for it."""
        held = yield asks.Serve(generation)
        yield asks.Say(held)
        newer = yield from self._obey(generation)
        yield asks.StopServing()
        return newer

    def _obey(self, generation: int) -> Protocol[int | None]:
        def accept(command: commands.WorkerCommand) -> bool:
            match command:
                case commands.Finish():
                    return True
                case commands.Release() | commands.Leave():
                    # A move may be over only in a later generation, of which a leaver hears
                    # nothing else.
                    return command.generation >= generation
                case commands.Swap() | commands.Checkpoint():
                    return command.generation == generation
            return False

        while True:
            command = yield asks.Await(accept, newer_than=generation)
            match command:
                case None:
                    return self._inbox.abort_generation
                case commands.Checkpoint():
                    written = yield asks.Write(command)
                    yield asks.Say(written)
                case commands.Swap():
                    yield from self.swap(command)
                    return None
                case commands.Release():
                    # The next attempt may have staged its own already.
                    yield asks.DropStaged(command.generation + 1)
                    return None
                case _:
                    yield asks.LeaveJob()

    def swap(self, command: commands.Swap) -> Protocol[None]:
        """An Abort right behind the Swap takes the staged groups away. The generation is committed
        all the same: the rank stays without groups, and reports for the newer one before its next
        transaction."""
        inbox = self._inbox
        entered = yield asks.Enter(command)
        if not entered.staged and not inbox.aborted(command.generation):
            raise LocalProtocolError(f"no groups are staged for generation {command.generation}")
        inbox.swapped(command)
        yield asks.Say(m.Swapped(generation=command.generation, swap_ns=entered.ns))
        if not self._me.done:
            yield asks.Republish()

    # ------------------------------------------------------------------ numbers differ

    def diverged(self, word: m.Diverged, *, joining: bool) -> Protocol[bool]:
        """True: go on all the same. False: an Abort has come; a newcomer that has not joined waits
        for none."""
        newer_than = None if joining else self._me.generation
        for again in itertools.count():
            whole = again % TABLE_EVERY < 2
            yield asks.ShowWaiting(asking=True)
            yield asks.Say(word if whole else msgspec.structs.replace(word, table={}))
            for _ in range(DIVERGED_AGAIN_S):
                yield asks.ShowWaiting(asking=True)
                command = yield asks.Await(_of_divergence, newer_than=newer_than, seconds=1.0)
                while isinstance(command, commands.Proceed) and command.number != word.number:
                    # It answers an earlier word, and was said twice.
                    command = yield asks.Await(_of_divergence, newer_than=newer_than, seconds=1.0)
                if isinstance(command, commands.Finish | commands.Leave):
                    yield asks.LeaveJob()
                if command is not None:
                    yield asks.ShowBusy()
                    return True
                if newer_than is not None and self._inbox.aborted(newer_than):
                    yield asks.ShowBusy()
                    return False
        raise AssertionError

    # ------------------------------------------------------------------ the end of the script

    def linger(self) -> Protocol[None]:
        """The script is over: the rank stays as a source of state until every other has got here.
        Returns when the process may end."""
        me = self._me
        while True:
            yield asks.Say(m.Done(tick=me.tick, version=me.version))
            command = yield asks.Await(_of_the_end, newer_than=me.generation)
            if command is not None:
                return
            yield from self.interrupted("", "", in_fence=False, computing=False)


def _nothing(_: commands.WorkerCommand) -> bool:
    return False


def _of_divergence(command: commands.WorkerCommand) -> bool:
    return isinstance(command, commands.Proceed | commands.Finish | commands.Leave)


def _of_the_end(command: commands.WorkerCommand) -> bool:
    return isinstance(command, commands.Finish | commands.Leave)
