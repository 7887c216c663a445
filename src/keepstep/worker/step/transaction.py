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
from keepstep.worker.script import refusals, results
from keepstep.worker.script.frames import script_frames
from keepstep.worker.state import fsdp
from keepstep.worker.state.objects import Snapshots, Undo, digests, snapshots
from keepstep.worker.step import trace
from keepstep.worker.step.call import Call
from keepstep.worker.step.fencing import Fencing
from keepstep.worker.step.finish import Finishing
from keepstep.worker.step.live_rank import LiveRank
from keepstep.worker.step.passes import Passes
from keepstep.worker.step.recovery import Recovery, Retry
from keepstep.worker.step.updates import Updates

NAMED_AT, NAMED_EVERY = 4, 64  # steps after which variables that are not carried are named


class Transactions:
    def __init__(self, live: LiveRank, recovery: Recovery) -> None:
        self.live = live
        self.recovery = recovery
        self.call = Call()
        self.fencing = Fencing(live, recovery, self.call, self._roll_back)
        self.updates = Updates(self.fencing)
        for model in live.models.values():
            model.register_forward_pre_hook(lambda *_: live.page.mark())
        self.passes = Passes(self.fencing)
        self._looked_at: set[str] = set()  # steps
        self._left_changed = ""  # what a roll-back could not put back
        self._pending: Callable[[], None] | None = None  # to be done at the next entry
        call = self.call
        cuda.refuse_graphs(lambda: call.site if call.step or call.warming else "")

    def run(self, site: str, step: bool, function: Callable[[], Any]) -> Any:
        live = self.live
        self.recovery.refuse_debt()
        if live.version > 0:
            live.unasked.look_at_attributes()
        if step:
            if site not in self._looked_at:
                self._looked_at.add(site)
                refusals.loader_loops(script_frames(), site)
            live.unasked.look(site, live.version)
        else:
            live.unasked.look_at_models()
        snapshots: Snapshots | None = self._snapshots(site)
        arguments = getattr(function, "arguments", None) if step else None
        live.side.note_inputs(arguments, live.replicated.small())
        self.carry_out_agreed()
        while True:
            if live.aborted():
                self.recovery.interrupted(None, in_fence=False, roll_back=None)
            self._refuse_alone(site)
            self._refuse_left_changed(site)
            if trace.active is not None:
                trace.active.entry(live, site, step, function)
            self.call.function = function
            self._begin(site, step, snapshots or self._snapshots(site))
            snapshots = None
            problem: BaseException | None = None
            try:
                if live.injector:
                    point = "before_forward" if step else "in_section"
                    live.injector.point(point, live.version)
                result = function()
                if not self.call.fenced:
                    if not (step or self.call.bare):
                        live.changes.before_fence(site)
                    known = results.keep(result)[1]
                    self.fencing.publish(
                        updating=False, result=known if isinstance(known, bytes) else None
                    )
                    self.fencing.meet(cuda.wait_for_queue)
                    self.updates.begins()
                self.updates.insist()
                self.fencing.unseen.refuse(site)
                if step:
                    live.changes.exit(site)
                    live.after_update()
                live.cells.exit()
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
                live.publisher.ahead.wait()
                problem = error
            if problem is not None:
                self._interrupt(problem)
                problem = None
                continue
            if trace.active is not None:
                trace.active.committed(live, site, step, result)
            self._commit(site, step, result)
            return result

    def _refuse_alone(self, site: str) -> None:
        live = self.live
        if live.alone and live.world > 1:
            raise UsageError(
                f"rank {live.rank} begins {site!r} after step {live.version}, where the script of "
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

    def _snapshots(self, site: str) -> Snapshots:
        """Of registered objects, as the transaction finds them."""
        changing = self.live.changes.objects_changed(site)
        found = snapshots(self.live.objects.values(), self.live.warn, changing)
        self.live.replicated.enter_objects(digests(found))
        return found

    def _begin(self, site: str, step: bool, snapshots: Snapshots) -> None:
        live = self.live
        self.call.begin(site, step)
        live.tracker.behind_fence = False
        self.fencing.placement.forget()
        self.fencing.unseen.forget()
        live.tracker.in_txn = True
        live.page.set("stepping", 1)
        live.page.where("compute" if step else "section")
        live.streams.entering(site)
        self.call.undo = Undo(
            live.streams.capture(),
            list(live.optimizers.values()),
            snapshots,
            live.flags.save(),
        )
        call = self.call.function
        live.variables.begin(
            script_frames(), getattr(call, "function", None), (getattr(call, "arguments", ()),)
        )
        live.cells.enter()
        live.gradients.enter()
        live.agreement.begin()
        if live.world > 1:
            live.replicated.enter(live.tick)
        live.changes.between()
        if not self.call.bare:
            live.changes.enter(site, step)
        if step:
            live.redundancy.begin()
            self.fencing.own.begins()
        if live.injector:
            live.injector.begin(live.version, live.models.values())

    def _interrupt(self, error: BaseException) -> None:
        """The function raised before its fence."""
        self.recovery.interrupted(error, in_fence=False, roll_back=self._roll_back)
        self._end()

    def _roll_back(self) -> None:
        live, undo = self.live, self.call.undo
        assert undo is not None
        self.fencing.own.disturbed()
        undo_arguments = getattr(self.call.function, "undo", None)
        if undo_arguments is not None:
            undo_arguments()
        fsdp.reset(live.models.values())
        undo.undo()
        live.flags.load(undo.flags)
        live.gradients.undo()
        live.cells.undo()
        if not self.call.bare:
            live.changes.undo()
            self._left_changed = self._left_changed or live.changes.left_changed()
        self._left_changed = self._left_changed or live.unasked.undo()
        if not self._left_changed and live.replicated.changed_since_entry(live.tick):
            self._left_changed = "state that replicas share"
        live.variables.undo()
        if self.call.step and not self._left_changed:
            name = live.side.inputs.changed(getattr(self.call.function, "arguments", None))
            self._left_changed = f"argument {name}" if name else ""
        for loop in live.loops:
            loop.retry()
        live.streams.restore(undo.streams)

    def finish(self, function: Any, finishing: Finishing) -> Any:
        """On a newcomer: the last step, of which all others have seen the end."""
        self.call.function, self.call.finishing = function, finishing
        self.call.warming, self.call.site = True, "the rest of a step"
        self.live.tracker.finishing = True
        try:
            with finishing.watching():
                return function()
        finally:
            self.live.tracker.finishing = False
            finishing.end(self.live.parameters)
            self.call.function = self.call.finishing = None
            self.call.warming, self.call.site = False, ""

    def _commit(self, site: str, step: bool, result: Any) -> None:
        live = self.live
        hold, snapshot = self.call.hold, self.call.snapshot
        late = live.variables.late()
        self._end()
        kept, found, why = results.keep(result)
        if why and site not in live.tracker.unkept:
            live.tracker.unkept[site] = why
            live.warn(
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
        live.tracker.commit(site, step, kept, coming, variables, mark)
        if mark and not self.call.updating:
            encoded = results.whole(kept)
        live.side.publish_late(site, encoded, late, foreseen, "" if self.call.updating else mark)
        version = live.version
        if step and (version == NAMED_AT or version % NAMED_EVERY == NAMED_AT):
            for text in (*live.variables.warnings(), *live.variables.unknown()):
                live.warn(text)
        if step:
            live.redundancy.updated = self.call.updated
        live.boundary.passed()
        live.committed(step)
        live.page.where("outside")
        if step and live.injector:
            live.injector.point("after_step", version)
        if self.recovery.owes:
            hold = self.recovery.pay_debt()
        if hold >= 0:
            self._pending = lambda: self.recovery.hold(hold)
        elif snapshot >= 0:
            self._pending = lambda: self._take_checkpoint(snapshot)

    def carry_out_agreed(self) -> None:
        """What the last fence agreed on (a hold, a checkpoint) is done here: at the entry of the
        next transaction, or where the script ends. Whatever the script does between transactions
        has then been done, once, on every rank, and is part of the state that is copied."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()
            self.fencing.own.disturbed()

    def _take_checkpoint(self, number: int) -> None:
        if self.live.periodic is not None and not self.live.aborted():
            self.live.periodic.take(number)

    def _end(self) -> None:
        self.fencing.guard.close()
        self.live.publisher.ahead.wait()
        self.call.site = ""
        self.call.function = None
        self.live.variables.end()
        for loop in self.live.loops:
            loop.end_transaction()
        self.call.passed = self.live.tracker.behind_fence = False
        self.live.tracker.in_txn = False
        self.live.injector.end()
