"""One step or section as a transaction: begin, compute, fence, apply (retried until it commits).

    begin   note what a retry must find again: RNG, buffers, gradients' presence, small state
    compute the user's function, with its collectives
    fence   publish the side state of tick+1, then meet all ranks (fence.py). Passed: every
            rank had complete gradients and every side state is safe
    apply   the optimizer's update and whatever follows in the function; tick becomes tick+1

The fence stands in front of the first optimizer update of the call (an optimizer pre-hook), or at
the function's end if no update ran. Nothing before it is visible to anyone, so it can be undone;
nothing after it needs another rank, so it can always be finished. Where the device can hold an
update back that is queued already (guard.py), the fence is met behind it, in the post-hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.errors import KeepstepError, UsageError
from keepstep.worker.device import cuda
from keepstep.worker.script import results
from keepstep.worker.script.frames import script_frames
from keepstep.worker.state import fsdp
from keepstep.worker.state.objects import Undo
from keepstep.worker.step import trace
from keepstep.worker.step.call import Call
from keepstep.worker.step.fencing import Fencing
from keepstep.worker.step.finish import Finishing
from keepstep.worker.step.passes import Passes
from keepstep.worker.step.recovery import Recovery, Retry
from keepstep.worker.step.seat import LiveRank
from keepstep.worker.step.updates import Updates

NAMED_AT, NAMED_EVERY = 4, 64  # steps after which variables that are not carried are named


class Transactions:
    def __init__(self, seat: LiveRank, recovery: Recovery) -> None:
        self.seat = seat
        self.recovery = recovery
        self.call = Call()
        self.fencing = Fencing(seat, recovery, self.call, self._roll_back)
        self.updates = Updates(self.fencing)
        for model in seat.models.values():
            model.register_forward_pre_hook(lambda *_: seat.page.mark())
        self.passes = Passes(self.fencing)
        self._left_changed = ""  # what a roll-back could not put back
        self._pending: Callable[[], None] | None = None  # to be done at the next entry
        call = self.call
        cuda.refuse_graphs(lambda: call.site if call.step or call.warming else "")

    def run(self, site: str, step: bool, function: Callable[[], Any]) -> Any:
        seat = self.seat
        self.recovery.refuse_debt()
        if seat.version > 0:
            seat.unasked.look_at_attributes()
        if step:
            seat.unasked.look(site)
            seat.side.note_inputs(getattr(function, "arguments", None))
        else:
            seat.unasked.look_at_models()
        self.settle()
        while True:
            if seat.aborted():
                self.recovery.interrupted(None, in_fence=False, roll_back=None)
            self._refuse_alone(site)
            self._refuse_left_changed(site)
            if trace.active is not None:
                trace.active.entry(seat, site, step, function)
            self.call.function = function
            self._begin(site, step)
            problem: BaseException | None = None
            try:
                if seat.injector:
                    point = "before_forward" if step else "in_section"
                    seat.injector.point(point, seat.version)
                result = function()
                if not self.call.fenced:
                    known = results.keep(result)[1]
                    self.fencing.publish(
                        updating=False, result=known if isinstance(known, bytes) else None
                    )
                    self.fencing.meet(cuda.wait_for_queue)
                    self.updates.begins()
                self.updates.insist()
                self.fencing.unseen.refuse(site)
                if step:
                    seat.changes.exit(site)
                    seat.after_update()
                seat.cells.exit()
            except Retry:
                self._roll_back()  # what the user's code did on its way out
                self._end()
                continue
            except KeepstepError:
                self._end()
                raise
            except Exception as error:
                if self.call.passed:
                    self._end()
                    raise  # after the fence nothing can be undone: the user's error stands
                self.fencing.guard.close()
                seat.publisher.ahead.wait()
                problem = error
            if problem is not None:
                self._interrupt(problem)
                problem = None
                continue
            if trace.active is not None:
                trace.active.committed(seat, site, step, result)
            self._commit(site, step, result)
            return result

    def _refuse_alone(self, site: str) -> None:
        seat = self.seat
        if seat.alone and seat.world > 1:
            raise UsageError(
                f"rank {seat.rank} begins {site!r} after step {seat.version}, where the script of "
                "another rank has ended",
                hint="every rank must make the same number of steps",
            )

    def _refuse_left_changed(self, site: str) -> None:
        name, self._left_changed = self._left_changed, ""
        if name:
            raise UsageError(
                f"{name} was changed in {site!r} before its fence, for the first time or unlike "
                "before, and could not be put back for a retry",
                hint="change parameters by an attached optimizer or between steps, and a copy of "
                "the batch instead of the batch",
            )

    def _begin(self, site: str, step: bool) -> None:
        seat = self.seat
        self.call.begin(site, step)
        seat.tracker.behind_fence = False
        self.fencing.placement.forget()
        self.fencing.unseen.forget()
        seat.tracker.in_txn = True
        seat.page.set("stepping", 1)
        seat.page.where("compute" if step else "section")
        seat.streams.entering(site)
        self.call.undo = Undo(
            seat.streams.capture(),
            list(seat.optimizers.values()),
            list(seat.objects.values()),
            seat.flags.save(),
        )
        call = self.call.function
        seat.variables.begin(
            script_frames(), getattr(call, "function", None), (getattr(call, "arguments", ()),)
        )
        seat.cells.enter()
        seat.gradients.enter()
        seat.agreement.begin()
        if seat.world > 1:
            seat.replicated.enter(seat.tick)
        seat.changes.between()
        if step:
            seat.changes.enter(site)
        if step:
            seat.redundancy.begin()
            self.fencing.own.begins()
        if seat.injector:
            seat.injector.begin(seat.version, seat.models.values())

    def _interrupt(self, error: BaseException) -> None:
        """The function raised before its fence."""
        self.recovery.interrupted(error, in_fence=False, roll_back=self._roll_back)
        self._end()

    def _roll_back(self) -> None:
        seat, undo = self.seat, self.call.undo
        assert undo is not None
        self.fencing.own.disturbed()
        undo_arguments = getattr(self.call.function, "undo", None)
        if undo_arguments is not None:
            undo_arguments()
        fsdp.reset(seat.models.values())
        undo.undo()
        seat.flags.load(undo.flags)
        seat.gradients.undo()
        seat.cells.undo()
        if self.call.step:
            seat.changes.undo()
            self._left_changed = seat.changes.left_changed()
        if not self._left_changed and seat.replicated.changed_since_entry(seat.tick):
            self._left_changed = "state that replicas share"
        seat.variables.undo()
        if self.call.step and not self._left_changed:
            name = seat.side.inputs.changed(getattr(self.call.function, "arguments", None))
            self._left_changed = f"argument {name}" if name else ""
        for loop in seat.loops:
            loop.retry()
        seat.streams.restore(undo.streams)

    def finish(self, function: Any, finishing: Finishing) -> Any:
        """On a newcomer: the last step, of which all others have seen the end."""
        self.call.function, self.call.finishing = function, finishing
        self.call.warming, self.call.site = True, "the rest of a step"
        self.seat.tracker.finishing = True
        try:
            return function()
        finally:
            self.seat.tracker.finishing = False
            finishing.end(self.seat.parameters)
            self.call.function = self.call.finishing = None
            self.call.warming, self.call.site = False, ""

    def _commit(self, site: str, step: bool, result: Any) -> None:
        seat = self.seat
        hold, snapshot = self.call.hold, self.call.snapshot
        late = seat.variables.late()
        self._end()
        kept, found, why = results.keep(result)
        if why and site not in seat.tracker.unkept:
            seat.tracker.unkept[site] = why
            seat.warn(
                f"the result of {site!r} cannot be carried to another process ({why}): a newcomer "
                "whose script uses it is stopped"
            )
        if isinstance(found, results.Coming) and not self.call.updating:
            found = found.read()  # the device had come to the fence
        encoded = found if isinstance(found, bytes) else None
        mark = ""
        if found is None and not why and not (self.call.updating and results.waits(kept)):
            mark = results.mark(kept)
        foreseen = encoded is not None and encoded == self.call.result
        if site in self.fencing.foresight:
            self.fencing.foresight[site].at_end(result, encoded)
        variables = late if late is not None else self.call.variables
        coming = found.read if isinstance(found, results.Coming) else encoded
        seat.tracker.commit(site, step, kept, coming, variables, mark)
        if mark and not self.call.updating:
            encoded = results.whole(kept)
        seat.side.publish_late(site, encoded, late, foreseen, "" if self.call.updating else mark)
        version = seat.version
        if step and (version == NAMED_AT or version % NAMED_EVERY == NAMED_AT):
            for text in (*seat.variables.warnings(), *seat.variables.unknown()):
                seat.warn(text)
        if step:
            seat.redundancy.updated = self.call.updated
        seat.committed(step)
        seat.page.where("outside")
        if step and seat.injector:
            seat.injector.point("after_step", version)
        if self.recovery.owes:
            hold = self.recovery.pay_debt()
        if hold >= 0:
            self._pending = lambda: self.recovery.hold(hold)
        elif snapshot >= 0:
            self._pending = lambda: self._take_checkpoint(snapshot)

    def settle(self) -> None:
        """What the last fence agreed on (a hold, a checkpoint) is done here: at the entry of the
        next transaction, or where the script ends. Whatever the script does between transactions
        has then been done, once, on every rank, and is part of the state that is copied."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()
            self.fencing.own.disturbed()

    def _take_checkpoint(self, number: int) -> None:
        if self.seat.periodic is not None and not self.seat.aborted():
            self.seat.periodic.take(number)

    def _end(self) -> None:
        self.fencing.guard.close()
        self.seat.publisher.ahead.wait()
        self.call.site = ""
        self.call.function = None
        self.seat.variables.end()
        for loop in self.seat.loops:
            loop.settle()
        self.call.passed = self.seat.tracker.behind_fence = False
        self.seat.tracker.in_txn = False
        self.seat.injector.end()
