"""What a rank does between an interruption and the first step of the next generation.

    interrupted            -> Report -> Decide -> (apply the step | roll back) -> Held
    hold word in the fence                                                      -> Held
    Held: serve state to newcomers, write a checkpoint if told so
        -> Swap: new groups in place, go on     -> Release: go on as before
        -> Leave: this process is no longer the rank
        -> a newer Abort: report again, from the boundary reached
    a witness finds that numbers differ -> Diverged -> Proceed: go on all the same
                                                    -> Abort, as anywhere else in a fence

The main thread walks this path; the daemon thread only makes it possible to leave a collective
(Abort shuts the sockets down) and builds new groups beside it (Stage). Nothing of the old
generation can touch memory once `groups.go_solo` has returned, so roll-back comes after it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn

import msgspec

from keepstep.errors import KeepstepError, LocalProtocolError, UsageError
from keepstep.model import messages as m
from keepstep.worker import checkpoint, cuda, faults, groups
from keepstep.worker.seat import Seat
from keepstep.worker.serving import StateServer

FAILURE_AGAIN_S = 5.0
DIVERGED_AGAIN_S = 5
TABLE_EVERY = 12  # of what is said again
TEXT_CHARS_MAX = 2000


def _bounded(table: Mapping[str, str]) -> dict[str, str]:
    """The same names on all ranks of a class, however many there are."""
    kept = sorted(table)[: m.TABLE_ENTRIES_MAX]
    return {name[: m.TABLE_NAME_CHARS_MAX]: table[name][: m.TABLE_VALUE_CHARS_MAX] for name in kept}


class Retry(BaseException):
    """Unwinds the user's step function after a RETRY decision taken inside its fence.

    A BaseException, so that a user's `except Exception` does not swallow it."""


class Finished(BaseException):
    """The job is over while this rank, whose own script had ended, stood by."""


class Recovery:
    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.owed: int | None = None  # COMMIT was decided in this generation: hold after applying
        self.owed_by = ""  # the step or section it was decided for
        self._divergences = 0  # found by this process

    # ------------------------------------------------------------------ entry points

    def interrupted(
        self, error: BaseException | None, *, in_fence: bool, roll_back: Callable[[], None] | None
    ) -> Literal["RETRY", "COMMIT"]:
        """Main thread, out of the user's code. Returns when the transaction is to be run again
        (everything is in place for it) or to be applied."""
        seat = self.seat
        began = time.monotonic_ns()
        kind: Literal["", "comm", "device", "user"] = ""
        text = ""
        if error is not None:
            kind = faults.classify(error)
            text = "".join(traceback.format_exception(error))[-16_000:]
            # Its frames hold activations and backends of the old generation.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = error.__context__ = error.__cause__ = None
            if not seat.aborted():
                self._announce_failure(kind, text)
        generation = seat.channel.abort_generation
        computing = roll_back is not None
        while True:
            # It does nothing more by itself: an agent that fences its node may spare it.
            seat.page.set("hold", 1)
            self._leave_groups()
            report = m.Report(
                generation=generation,
                tick=seat.tick,
                version=seat.version,
                in_fence=in_fence,
                computing=computing,
                error_kind=kind,
                error=text,
                done=seat.done,
            )
            seat.abort_ns = time.monotonic_ns() - began
            seat.channel.send(report)
            tick = self._decision(generation)
            if tick is None:
                generation = seat.channel.abort_generation
                continue
            if tick == seat.tick + 1 and in_fence:
                seat.page.set("hold", 0)
                self.owed = generation
                return "COMMIT"
            if tick != seat.tick:
                raise LocalProtocolError(
                    f"rank {seat.rank} at tick {seat.tick} told to go to {tick}"
                )
            in_fence = False
            if roll_back is not None:
                roll_back()
                roll_back = None
            newer = self._hold(generation)
            if newer is None:
                return "RETRY"
            generation = newer
            kind, text = "", ""

    def refuse_debt(self) -> None:
        """All others have this transaction behind them, and here its update may be half done."""
        if self.owed is not None:
            raise UsageError(
                f"{self.owed_by!r} raised after it was decided to commit it but the script went on",
                hint="let an exception that comes after the optimizer's update end the script, or "
                "handle it inside the step",
            )

    def pay_debt(self) -> int:
        """A transaction was applied because of COMMIT: the generation to hold for at the next
        entry."""
        assert self.owed is not None
        generation, self.owed = self.owed, None
        return generation

    def hold(self, generation: int) -> None:
        """At the boundary now reached. Planned: the hold word was in the last fence; if it came
        from a peer, our own copy of Hold is on its way, or its Release is here already and ends
        this at once. Unplanned: the last transaction was applied because of COMMIT."""
        newer = self._hold(generation)
        if newer is not None:
            self.interrupted(None, in_fence=False, roll_back=None)

    def diverged(
        self,
        witness: m.Witness,
        site: str,
        words: str = "",
        table: Mapping[str, str] | None = None,
        agreed: int = -1,
    ) -> None:
        """Main thread: numbers differ that must be equal. Returns when the job is to go on all the
        same. Called inside a fence, at the same tick by every rank, before the update; an Abort
        raises ConnectionAbortedError there, as it does in the fence itself. Or in a newcomer that
        has not joined; those who hold for it wait meanwhile."""
        seat = self.seat
        assigned = seat.line.assigned
        joining = assigned is not None and seat.generation < assigned.generation
        self._divergences += 1
        number = self._divergences
        self._say_diverged(
            m.Diverged(
                generation=assigned.generation if joining and assigned else seat.generation,
                tick=seat.tick,
                version=seat.version,
                agreed=agreed,
                witness=witness,
                site=site[:TEXT_CHARS_MAX],
                words=words[:TEXT_CHARS_MAX],
                table=_bounded(table or {}),
                number=number,
            ),
            interruptible=not joining,
        )

    def _say_diverged(self, word: m.Diverged, *, interruptible: bool) -> None:
        seat = self.seat
        found: list[m.WorkerCommand] = []

        def answered() -> bool:
            """Under the channel's lock. An answer to an earlier number was said twice."""
            inbox = seat.channel.inbox
            for command in [c for c in inbox if isinstance(c, m.Proceed | m.Finish | m.Leave)]:
                inbox.remove(command)
                if not isinstance(command, m.Proceed) or command.number == word.number:
                    found.append(command)
            return bool(found) or (interruptible and seat.aborted())

        was = seat.page.get("where")
        seat.page.where("diverged")
        seat.page.set("asked_ns", time.monotonic_ns())
        seat.page.set("hold", 1)
        try:
            for again in itertools.count():
                if found:
                    break
                # Again: it may be lost with the agent's stream. The table is large, and seldom is.
                whole = again % TABLE_EVERY < 2
                seat.channel.send(word if whole else msgspec.structs.replace(word, table={}))
                for _ in range(DIVERGED_AGAIN_S):
                    seat.page.set("asked_ns", time.monotonic_ns())
                    seat.page.set("hold", 1)
                    if seat.channel.wait_until(answered, 1.0):
                        break
                if not found and interruptible and seat.aborted():
                    raise ConnectionAbortedError("aborted while numbers differed")
        finally:
            seat.page.set("where", was)
            seat.page.mark()
            seat.page.set("hold", 0)
            seat.page.set("asked_ns", 0)
        if any(isinstance(command, m.Finish | m.Leave) for command in found):
            self.leave()

    # ------------------------------------------------------------------ parts

    def _announce_failure(self, kind: Literal["comm", "device", "user"], text: str) -> None:
        """A peer's death breaks collectives a moment before the orchestrator tells us."""
        seat = self.seat
        if kind == "comm" and seat.channel.wait_until(seat.aborted, 0.2):
            return
        failure = m.Failure(
            generation=seat.generation, error_kind=kind, error=text, version=seat.version
        )
        while True:
            seat.page.set("asked_ns", time.monotonic_ns())
            seat.page.set("hold", 1)
            seat.channel.send(failure)
            if seat.channel.wait_until(seat.aborted, FAILURE_AGAIN_S):
                break  # else: it may be lost with the agent's stream
        seat.page.set("asked_ns", 0)

    def _leave_groups(self) -> None:
        groups.abort()
        if not groups.solo() and not groups.destroyed():
            groups.go_solo()

    def _decision(self, generation: int) -> int | None:
        command = self.seat.channel.wait(
            lambda c: (
                isinstance(c, m.Decide | m.Leave | m.Finish)
                and getattr(c, "generation", generation) == generation
            ),
            newer_than=generation,
        )
        if isinstance(command, m.Leave | m.Finish):
            self.leave()
        return command.tick if isinstance(command, m.Decide) else None

    def _hold(self, generation: int) -> int | None:
        """None: go on training. A number: a newer Abort came, report for it."""
        seat = self.seat
        seat.page.where("held")
        seat.page.set("hold", 1)
        if groups.solo() and not groups.destroyed():
            groups.reset_ddp(seat.version)
        cuda.drain()  # whoever reads the state does so in other streams
        seat.changes.confirm()
        export = seat.state.export()
        server = StateServer(seat.welcome.interface, seat.welcome.token, export, seat.tick)
        try:
            seat.channel.send(
                m.Held(
                    generation=generation,
                    tick=seat.tick,
                    version=seat.version,
                    serve=server.address,
                    pid=os.getpid(),
                    done=seat.done,
                    classes=sorted(set(export.classes.values())),
                )
            )
            return self._obey(generation)
        finally:
            server.close()
            seat.page.set("hold", 0)

    def _obey(self, generation: int) -> int | None:
        seat = self.seat
        while True:
            command = seat.channel.wait(
                lambda c: (
                    isinstance(c, m.Finish)
                    # A move may be over only in a later generation, of which a leaver hears
                    # nothing else.
                    or (isinstance(c, m.Release | m.Leave) and c.generation >= generation)
                    or (isinstance(c, m.Swap | m.Checkpoint) and c.generation == generation)
                ),
                newer_than=generation,
            )
            match command:
                case None:
                    return seat.channel.abort_generation
                case m.Checkpoint():
                    self._checkpoint(command)
                case m.Swap():
                    self.swap(command)
                    return None
                case m.Release():
                    # The next attempt may have staged its own already.
                    seat.stager.discard(below=command.generation + 1)
                    return None
                case _:
                    self.leave()

    def _checkpoint(self, command: m.Checkpoint) -> None:
        """The state in memory is worth more than the copy: a full disk must not end its holder."""
        try:
            checkpoint.write(self.seat, command)
        except (OSError, KeepstepError) as error:
            self.seat.channel.send(
                m.CheckpointFailed(
                    generation=command.generation, path=command.path, error=str(error)
                )
            )

    def swap(self, command: m.Swap) -> None:
        seat = self.seat
        began = time.monotonic_ns()
        if not command.solo and not seat.done and not groups.destroyed():
            if not groups.solo():
                groups.go_solo(at_boundary=True)
                groups.reset_ddp(seat.version)
            self._enter_groups(command.generation)
        seat.alone = command.solo or seat.world == 1
        seat.generation = seat.resumed = command.generation
        seat.replicated.forget()
        seat.changes.forget()
        seat.page.set("generation", command.generation)
        seat.page.set("stepping", 1)  # a newcomer that stands still from here on hangs
        seat.page.new_tick()
        if seat.channel.hold_generation <= command.generation:
            seat.channel.hold_generation = -1
        seat.channel.snapshot = -1  # what was asked for before the move was dropped with it
        if not command.same_buddy:
            seat.channel.buddy, seat.channel.parity = command.buddy, command.parity
        elapsed = time.monotonic_ns() - began
        seat.channel.send(m.Swapped(generation=command.generation, swap_ns=elapsed))
        if not seat.done:
            with contextlib.suppress(ConnectionAbortedError):  # again after the next swap
                seat.republish()
            seat.redundancy.reconnect()

    def _enter_groups(self, generation: int) -> None:
        """An Abort right behind the Swap takes the staged groups away. The generation is committed
        all the same: stay solo, and report for the newer one before the next transaction."""
        staged = self.seat.stager.take(generation)
        if staged is not None:
            try:
                groups.swap(staged)
                return
            except RuntimeError:
                if not staged.aborted:
                    raise
            staged.discard()
        if self.seat.channel.abort_generation <= generation:
            raise LocalProtocolError(f"no groups are staged for generation {generation}")

    def leave(self) -> NoReturn:
        if self.seat.done:
            raise Finished
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # ------------------------------------------------------------------ the end of the script

    def linger(self) -> None:
        """The script is over. Stay as a source of state until every rank has got here."""
        seat = self.seat
        seat.done = True
        seat.page.where("done")
        seat.channel.send(m.Done(tick=seat.tick, version=seat.version))
        while True:
            command = seat.channel.wait(
                lambda c: isinstance(c, m.Finish | m.Leave), newer_than=seat.generation
            )
            if command is not None:
                return
            try:
                self.interrupted(None, in_fence=False, roll_back=None)
            except Finished:
                return
            seat.page.where("done")
            seat.channel.send(m.Done(tick=seat.tick, version=seat.version))
