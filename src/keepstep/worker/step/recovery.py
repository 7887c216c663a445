"""A rank's recovery, as core/rank/recovering says, done to what this process has.

The main thread walks that path; the daemon thread only makes it possible to leave a collective
(Abort shuts the sockets down) and builds new groups beside it (Stage). Nothing of the old
generation can touch memory once `groups.go_solo` has returned, so roll-back comes after it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from keepstep.core.rank import asks
from keepstep.core.rank.recovering import Kind, Recovering, Verdict
from keepstep.errors import KeepstepError, UsageError
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.worker.checkpoint import checkpoint
from keepstep.worker.device import cuda
from keepstep.worker.groups import groups, reducers
from keepstep.worker.state.serving import StateServer
from keepstep.worker.step import failures
from keepstep.worker.step.live_rank import LiveRank

TEXT_CHARS_MAX = 2000

Result = TypeVar("Result")


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
    def __init__(self, live: LiveRank) -> None:
        self.live = live
        self.owed_by = ""  # the step or section that COMMIT was decided for
        self._protocol = Recovering(live, live.channel.inbox)
        self._divergences = 0  # found by this process
        self._began_ns = 0
        self._roll_back: Callable[[], None] | None = None
        self._server: StateServer | None = None

    # ------------------------------------------------------------------ entry points

    def interrupted(
        self, error: BaseException | None, *, in_fence: bool, roll_back: Callable[[], None] | None
    ) -> Verdict:
        """Main thread, out of the user's code. Returns when the transaction is to be run again
        (everything is in place for it) or to be applied."""
        self._began_ns = time.monotonic_ns()
        kind: Kind = ""
        text = ""
        if error is not None:
            kind = failures.classify(error)
            text = "".join(traceback.format_exception(error))[-16_000:]
            # Its frames hold activations and backends of the old generation.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = error.__context__ = error.__cause__ = None
        self._roll_back = roll_back
        return self._drive(
            self._protocol.interrupted(
                kind, text, in_fence=in_fence, computing=roll_back is not None
            )
        )

    def refuse_debt(self) -> None:
        """All others have this transaction behind them, and here its update may be half done."""
        if self._protocol.owes:
            raise UsageError(
                f"{self.owed_by!r} raised after it was decided to commit it but the script went on",
                hint="let an exception that comes after the optimizer's update end the script, or "
                "handle it inside the step",
            )

    @property
    def owes(self) -> bool:
        return self._protocol.owes

    def pay_debt(self) -> int:
        """A transaction was applied because of COMMIT: the generation to hold for at the next
        entry."""
        return self._protocol.pay()

    def hold(self, generation: int) -> None:
        """At the boundary now reached."""
        self._drive(self._protocol.hold(generation))

    def swap(self, command: commands.Swap) -> None:
        self._drive(self._protocol.swap(command))

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
        live = self.live
        assigned = live.process.assigned
        joining = assigned is not None and live.generation < assigned.generation
        self._divergences += 1
        word = m.Diverged(
            generation=assigned.generation if joining and assigned else live.generation,
            tick=live.tick,
            version=live.version,
            agreed=agreed,
            witness=witness,
            site=site[:TEXT_CHARS_MAX],
            words=words[:TEXT_CHARS_MAX],
            table=_bounded(table or {}),
            number=self._divergences,
        )
        was = live.page.get("where")
        live.page.where("diverged")
        try:
            accepted = self._drive(self._protocol.diverged(word, joining=joining))
        finally:
            live.page.set("where", was)
        if not accepted:
            raise ConnectionAbortedError("aborted while numbers differed")

    def linger(self) -> None:
        """The script is over. Stay as a source of state until every rank has got here."""
        self.live.done = True
        self.live.page.where("done")
        with contextlib.suppress(Finished):
            self._drive(self._protocol.linger())

    def leave(self) -> NoReturn:
        if self.live.done:
            raise Finished
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # ------------------------------------------------------------------ what the protocol asks for

    def _drive(self, protocol: asks.Protocol[Result]) -> Result:
        try:
            return self.live.channel.drive(protocol, self._perform)
        finally:
            self._stop_serving()
            self._roll_back, self._began_ns = None, 0

    def _perform(self, ask: asks.Ask) -> Any:
        page = self.live.page
        match ask:
            case asks.ShowWaiting():
                page.set("asked_ns", time.monotonic_ns() if ask.asking else 0)
                page.set("hold", 1)
            case asks.ShowBusy():
                page.mark()  # first: a rank that stands and does not hold hangs
                page.set("hold", 0)
                page.set("asked_ns", 0)
            case asks.LeaveGroups():
                self._leave_groups()
            case asks.RollBack():
                roll_back, self._roll_back = self._roll_back, None
                if roll_back is not None:
                    roll_back()
            case asks.Serve():
                return self._serve(ask.generation)
            case asks.StopServing():
                self._stop_serving()
            case asks.Write():
                return self._write(ask.command)
            case asks.Enter():
                return self._enter(ask.command)
            case asks.Republish():
                with contextlib.suppress(ConnectionAbortedError):  # again after the next swap
                    self.live.publisher.republish()
                self.live.redundancy.reconnect()
            case asks.DropStaged():
                self.live.stager.discard(ask.below)
            case asks.LeaveJob():
                self.leave()
        return None

    def _leave_groups(self) -> None:
        began = self._began_ns or time.monotonic_ns()
        groups.abort()
        if not groups.solo() and not groups.destroyed():
            groups.go_solo()
        self.live.abort_ns = time.monotonic_ns() - began

    def _serve(self, generation: int) -> m.Held:
        live = self.live
        live.page.where("held")
        live.page.set("hold", 1)
        if groups.solo() and not groups.destroyed():
            reducers.reset(live.version)
        cuda.drain()  # whoever reads the state does so in other streams
        live.changes.confirm()
        export = live.state.export()
        self._server = StateServer(live.welcome.interface, live.welcome.token, export, live.tick)
        return m.Held(
            generation=generation,
            tick=live.tick,
            version=live.version,
            serve=self._server.address,
            pid=os.getpid(),
            done=live.done,
            classes=sorted(set(export.classes.values())),
        )

    def _stop_serving(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self.live.page.set("hold", 0)
            if self.live.done:
                self.live.page.where("done")

    def _write(self, command: commands.Checkpoint) -> m.Checkpointed | m.CheckpointFailed:
        """The state in memory is worth more than the copy: a full disk must not end its holder."""
        try:
            return checkpoint.write(self.live, self.live.redundancy, command)
        except (OSError, KeepstepError) as error:
            return m.CheckpointFailed(
                generation=command.generation, path=command.path, error=str(error)
            )

    def _enter(self, command: commands.Swap) -> asks.Entered:
        live = self.live
        began = time.monotonic_ns()
        staged = True
        if not command.solo and not live.done and not groups.destroyed():
            if not groups.solo():
                groups.go_solo(at_boundary=True)
                reducers.reset(live.version)
            staged = self._put_in_place(command.generation)
        live.alone = command.solo or live.world == 1
        live.generation = live.resumed = command.generation
        live.replicated.forget()
        live.changes.forget()
        live.page.set("generation", command.generation)
        live.page.set("stepping", 1)  # a newcomer that stands still from here on hangs
        live.page.new_tick()
        return asks.Entered(staged, time.monotonic_ns() - began)

    def _put_in_place(self, generation: int) -> bool:
        """False: there are no groups of this generation, or an Abort has taken them away."""
        staged = self.live.stager.take(generation)
        if staged is None:
            return False
        try:
            groups.swap(staged)
        except RuntimeError:
            if not staged.aborted:
                raise
            staged.discard()
            return False
        return True
