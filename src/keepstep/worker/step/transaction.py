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

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from keepstep.errors import KeepstepError, UsageError
from keepstep.worker.device import cuda, guard
from keepstep.worker.groups import groups
from keepstep.worker.groups.unseen import Unseen
from keepstep.worker.script import refusals, results
from keepstep.worker.script.frames import script_frames
from keepstep.worker.script.tree import Txn
from keepstep.worker.state import buckets, fsdp
from keepstep.worker.state.objects import Undo
from keepstep.worker.state.placements import GradientPlacement
from keepstep.worker.state.witness import EARLY
from keepstep.worker.step import trace
from keepstep.worker.step.finish import Finishing
from keepstep.worker.step.pace import OwnTime
from keepstep.worker.step.recovery import Recovery, Retry
from keepstep.worker.step.seat import Seat

_TRAIN_INSIDE = "forward, backward and optimizer.step() belong into one @ks.step function"
NAMED_AT, NAMED_EVERY = 4, 64  # steps after which variables that are not carried are named


class Transactions:
    def __init__(self, seat: Seat, recovery: Recovery) -> None:
        self.seat = seat
        self.recovery = recovery
        self.running: str = ""  # site of the transaction in progress
        self.warming = False  # a newcomer's warm-up: no fence, no rules
        self._step = False
        self._fenced = False
        self._passed = False
        self._in_fence = False
        self._hold = self._snapshot = -1
        self._left_changed = ""  # what a roll-back could not put back
        self._pending: Callable[[], None] | None = None  # to be done at the next entry
        self._updated: list[str] = []  # optimizers, in the order of their updates
        self._backwards = 0
        self.outside: Callable[[str, bool, Callable[[], Any]], Any] = lambda *_: None
        self._forwarded = False  # a DDP model's forward for a backward, in this transaction
        self._strayed = False  # and the last one outside of any
        self._result: bytes | None = None  # as published in the fence
        self._variables = b""  # of the script, as published in the fence
        self._finishing: Finishing | None = None
        self._foresight: dict[str, results.Foresight] = {}  # by site
        self._usual: dict[str, int] = {}  # site -> backward passes of its last step
        self._function: Any = None
        self._attached = {id(o): n for n, o in seat.optimizers.items()}
        self._guard = guard.Guard()
        self._own = OwnTime(seat.page)
        self._placement = GradientPlacement(seat.parameters)
        self._unseen = Unseen()
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)
        for model in seat.models.values():
            model.register_forward_pre_hook(lambda *_: seat.page.mark())
        self._watch_ddp()
        cuda.refuse_graphs(lambda: self.running if self._step or self.warming else "")

    # ------------------------------------------------------------------ rules inside a step

    def _watch_ddp(self) -> None:
        """DDP's collectives start in C++: its forward and any backward are where to see them."""
        ddp: Any = torch.nn.parallel.DistributedDataParallel
        autograd: Any = torch.autograd
        forward, backward, sync = ddp._pre_forward, autograd.backward, ddp._sync_buffers

        def watched_sync(module: Any) -> None:
            if self.running or self.warming:
                sync(module)
            # else it has been done in a section of its own

        def watched_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.refuse_collective("forward of a DistributedDataParallel model")
            if not self.running and not self.warming:
                self._buffers_outside(module, lambda: sync(module))
            synced = module.require_backward_grad_sync
            if torch.is_grad_enabled() and self.running:
                self._forwarded, self._strayed = True, False
            elif torch.is_grad_enabled() and synced and not self.warming:
                self._forwarded, self._strayed = False, True
            self.seat.agreement.collective(f"DDP forward, synchronised: {synced}", ())
            return forward(module, *args, **kwargs)

        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            if self._passed and groups.ddp_modules():
                self.refuse_collective("backward through a DistributedDataParallel model")
            # Inside it may be of another model; a script that trains so does it from the start.
            stray = self._strayed and not self._forwarded and not self.warming
            if stray and (not self.running or self.seat.version == 0):
                raise UsageError(
                    "backward through a DistributedDataParallel model whose forward ran outside of "
                    "any step: the collectives in it could not be repeated",
                    hint=_TRAIN_INSIDE,
                )
            self._backward_begins()
            result = backward(*args, **kwargs)
            self.seat.redundancy.backward_done()
            return result

        ddp._pre_forward, ddp._sync_buffers = watched_forward, watched_sync
        autograd.backward = watched_backward

    def _buffers_outside(self, module: Any, sync: Callable[[], None]) -> None:
        """An evaluation between steps. DDP broadcasts the buffers in its first forward behind a
        training step, in C++: here that is a section. What it does to the buffers is part of the
        state at its fence."""
        names = {id(m): name for name, m in buckets.modules(self.seat.parameters).items()}
        site = f"buffers of DistributedDataParallel {names.get(id(module), '')} (bare)"
        replay = self.seat.tracker.replay
        if replay is not None:  # a newcomer: its own module has no training step behind it
            expected = replay.expected()
            due = isinstance(expected, Txn) and expected.site == site
        else:
            due = module.will_sync_module_buffers()
        if due and hasattr(module, "buffer_hook"):
            raise UsageError(
                "forward of a DistributedDataParallel model with a buffer hook outside of any step",
                hint="put the evaluation into a function with @ks.section, or use model.module",
            )
        if due:
            self.outside(site, False, sync)

    def _backward_begins(self) -> None:
        """The last pass of a step, going by the step before: what will be published is known."""
        if self.running and self._step and not self._fenced and not self.warming:
            self._backwards += 1
            self.seat.changes.midway(self.running)
            if self._backwards == 1:
                self._own.meets()
                self.seat.gradients.before_backward()
            last = self._backwards == self._usual.get(self.running)
            self.seat.redundancy.backward(last)
            if last and self.seat.publisher.sends_ahead():
                variables = self.seat.variables.capture()
                self.seat.side.ahead(self.running, self._foreseen(), variables, self._rest())

    def saw_collective(self, name: str, args: Any, kwargs: Any) -> None:
        self.refuse_collective(f"collective {name}")
        given = [*args, *kwargs.values()]
        self.seat.agreement.collective(name, [x for x in given if isinstance(x, torch.Tensor)])

    def refuse_collective(self, what: str) -> None:
        if self._passed and not self.warming:
            raise UsageError(
                f"{what} after the first optimizer update inside step {self.running!r}",
                hint="a step is committed when its first update begins: move the collective into a "
                "@ks.section, or split the step in two",
            )

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._finishing is not None:
            code = getattr(self._function, "code", None)
            arguments = getattr(self._function, "arguments", {}).values()
            self._finishing.fence(code, self.seat.parameters, arguments)
            self._finishing.before_update(optimizer)
        if self.warming or self.seat.rebuilding:
            return
        if not self.running:
            self._refuse_outside(optimizer)
            return
        refusals.inside_backward(optimizer, self.running)
        if id(optimizer) not in self._attached:
            raise UsageError(
                f"{type(optimizer).__name__}.step() in {self.running!r}, but it was not attached",
                hint="give every optimizer to keepstep.attach",
            )
        if kwargs.get("closure") is not None or any(callable(a) for a in args[1:]):
            raise UsageError(
                f"optimizer.step(closure) in {self.running!r} cannot be protected",
                hint="compute loss and gradients first, then call step() without a closure",
            )
        if not self._step:
            raise UsageError(
                f"{type(optimizer).__name__}.step() inside section {self.running!r}",
                hint="optimizer updates belong into a @ks.step function",
            )
        name = self._attached[id(optimizer)]
        self.seat.gradients.before_update()
        if self._fenced:
            self.seat.redundancy.before_update(name)
            self._insist()
        else:
            self._fence_update(optimizer)
        self._updated.append(name)

    def _refuse_outside(self, optimizer: Any) -> None:
        """Not if it changes nothing: a call that keeps schedulers quiet, or with a learning rate of
        zero, by which torch makes the state of an optimizer."""
        groups_ = optimizer.param_groups
        graded = any(p.grad is not None for group in groups_ for p in group["params"])
        if graded and any(_rate(group.get("lr", 1)) != 0 for group in groups_):
            raise UsageError(
                f"{type(optimizer).__name__}.step() outside of any @ks.step",
                hint=_TRAIN_INSIDE,
            )

    def _fence_update(self, optimizer: Any) -> None:
        self._about_to = self._attached[id(optimizer)]
        # Whoever compares states waits for the device, which must then not wait for the host.
        compared = self.seat.replicated.due(self.seat.tick)
        guarded = not compared and self._guard.suits(optimizer)
        self._publish(updating=True)
        if guarded and self._guard.begin(optimizer, self.seat.aborted):
            self.seat.changes.queued()
            return  # the rest of the fence is in the post-hook
        self._meet(cuda.wait_for_queue)
        self._update_begins()
        self._guard.rehearse(optimizer)

    def _after_update(self, optimizer: Any, _: Any, __: Any) -> None:
        self._decide_update(optimizer)
        self._placement.restore(optimizer)
        if self._finishing is not None:
            self._finishing.after_update()
        if self.running and not self.warming:
            self.seat.changes.updated()

    def _decide_update(self, optimizer: Any) -> None:
        """The update is queued, and if it is guarded the device holds it back: decide it."""
        if not self._guard.end(optimizer):
            return
        try:
            met = self._meet(self._guard.wait)
            went = met and self._guard.decide(guard.GO)
        finally:
            self._guard.close()
        if not went:  # to be committed all the same, and the gradients are as they were
            guard.apply_unguarded(optimizer)
        self._update_begins()

    def _update_begins(self) -> None:
        seat = self.seat
        if seat.injector and self._step:
            seat.injector.point("in_optimizer", seat.version, seat.parameters[0])

    def _insist(self) -> None:
        """What the fence raised was for us: an `except:` of the user's must not swallow it."""
        if self._guard.close():
            raise UsageError(
                f"an exception inside the optimizer's step was caught in {self.running!r}",
                hint="let it leave the step: what the optimizer has done cannot be known",
            )
        if not self._passed:
            raise self._refused or Retry

    # ------------------------------------------------------------------ the transaction

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
            self._function = function
            undo = self._begin(site, step)
            problem: BaseException | None = None
            try:
                if seat.injector:
                    point = "before_forward" if step else "in_section"
                    seat.injector.point(point, seat.version)
                result = function()
                if not self._fenced:
                    known = results.keep(result)[1]
                    self._publish(
                        updating=False, result=known if isinstance(known, bytes) else None
                    )
                    self._meet(cuda.wait_for_queue)
                    self._update_begins()
                self._insist()
                self._unseen.refuse(site)
                if step:
                    seat.changes.exit(site)
                    seat.after_update()
                seat.cells.exit()
            except Retry:
                self._roll_back(undo)  # what the user's code did on its way out
                self._end()
                continue
            except KeepstepError:
                self._end()
                raise
            except Exception as error:
                if self._passed:
                    self._end()
                    raise  # after the fence nothing can be undone: the user's error stands
                self._guard.close()
                seat.publisher.ahead.wait()
                problem = error
            if problem is not None:
                self._interrupt(problem, undo)
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

    def _begin(self, site: str, step: bool) -> Undo:
        seat = self.seat
        self.running, self._step = site, step
        self._fenced = self._passed = self._in_fence = seat.tracker.behind_fence = False
        self._refused: KeepstepError | None = None
        self._hold = self._snapshot = -1
        self._backwards = 0
        self._forwarded = False
        self._about_to = ""
        self._updated = []
        self._placement.forget()
        self._unseen.forget()
        seat.tracker.in_txn = True
        seat.page.set("stepping", 1)
        seat.page.where("compute" if step else "section")
        seat.streams.entering(site)
        self._undo = Undo(
            seat.streams.capture(),
            list(seat.optimizers.values()),
            list(seat.objects.values()),
            seat.flags.save(),
        )
        call = self._function
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
            self._own.begins()
        if seat.injector:
            seat.injector.begin(seat.version, seat.models.values())
        return self._undo

    def _interrupt(self, error: BaseException, undo: Undo) -> None:
        """The function raised before its fence."""
        self.recovery.interrupted(error, in_fence=False, roll_back=lambda: self._roll_back(undo))
        self._end()

    def _roll_back(self, undo: Undo) -> None:
        seat = self.seat
        self._own.disturbed()
        undo_arguments = getattr(self._function, "undo", None)
        if undo_arguments is not None:
            undo_arguments()
        fsdp.reset(seat.models.values())
        undo.undo()
        seat.flags.load(undo.flags)
        seat.gradients.undo()
        seat.cells.undo()
        if self._step:
            seat.changes.undo()
            self._left_changed = seat.changes.left_changed()
        if not self._left_changed and seat.replicated.changed_since_entry(seat.tick):
            self._left_changed = "state that replicas share"
        seat.variables.undo()
        if self._step and not self._left_changed:
            name = seat.side.inputs.changed(getattr(self._function, "arguments", None))
            self._left_changed = f"argument {name}" if name else ""
        for loop in seat.loops:
            loop.retry()
        seat.streams.restore(undo.streams)

    def _side_state(self) -> bytes:
        return self.seat.side.make(
            self.running,
            self._step,
            self._updating,
            result=self._result,
            variables=self._variables,
            rest=self._rest() if self._updating else None,
        )

    def _rest(self) -> list[dict[str, Any]] | None:
        """What the newcomer of a rank that is lost behind this fence needs to finish the step."""
        call = self._function
        code, arguments = getattr(call, "code", None), getattr(call, "arguments", {})

        def knows(thing: Any) -> bool:
            return self.seat.known.knows(thing) or self.seat.variables.hold(thing)

        seat = self.seat
        return seat.side.behind.locals_of(
            self.running, code, arguments, knows, seat.known.lying_with
        )

    def finish(self, function: Any, finishing: Finishing) -> Any:
        """On a newcomer: the last step, of which all others have seen the end."""
        self._function, self._finishing = function, finishing
        self.warming, self.running = True, "the rest of a step"
        self.seat.tracker.finishing = True
        try:
            return function()
        finally:
            self.seat.tracker.finishing = False
            finishing.end(self.seat.parameters)
            self._function = self._finishing = None
            self.warming, self.running = False, ""

    def _foreseen(self) -> bytes | None:
        foresight = self._foresight.setdefault(self.running, results.Foresight())
        return foresight.at_fence(getattr(self._function, "code", None))

    def _publish(self, updating: bool, result: bytes | None = None) -> None:
        """`result`, if the function has ended; otherwise it may be foreseen."""
        seat = self.seat
        if updating:
            self._placement.align()
        if result is None and self._step:
            result = self._foreseen()
        self._result = result
        self._fenced, self._updating = True, updating
        self._usual[self.running] = self._backwards
        seat.publisher.ahead.wait()
        if seat.injector:
            seat.injector.point("before_fence", seat.version)
        try:
            if seat.aborted():
                raise ConnectionAbortedError("aborted before the fence")
            if self._step:
                seat.changes.fence(self.running, updating)
                seat.publisher.secure(updating)
            seat.streams.leaving(self.running)
            self._variables = seat.variables.capture()
            side_state = self._side_state()
            seat.publisher.ahead.judge(side_state)
            seat.publisher.publish(seat.tick + 1, side_state)
        except KeepstepError as error:
            self._refused = error
            raise
        except (RuntimeError, OSError) as error:
            self._fence_failed(error)

    def _meet(self, wait_for_device: Callable[[Callable[[], bool]], None]) -> bool:
        """Whether the fence was passed. If it was not, it was decided to commit all the same;
        otherwise Retry is raised."""
        seat = self.seat
        passed = True
        try:
            wait_for_device(self._aborted)
            seat.side.complete_note()
            if self._step:
                seat.side.publish_locals()
                seat.publisher.secured(self._updating, self._let_device_go)
            seat.page.where("fence")
            self._in_fence = True
            self._all_ranks_here()
        except KeepstepError as error:
            self._refused = error
            raise
        except (RuntimeError, OSError) as error:
            passed = False
            self._guard.close()  # recovery waits for the device
            self._fence_failed(error)
        self._passed = self.seat.tracker.behind_fence = True
        if passed and not seat.alone:
            self._unseen.passed(self.running)
        seat.page.where("apply")
        self._own.passed()
        return passed

    def _aborted(self) -> bool:
        """While the device is at work."""
        self.seat.side.complete_note()
        return self.seat.aborted()

    def _let_device_go(self) -> None:
        """An update that it holds back is not made, but later and by the host."""
        self._guard.decide(guard.SKIP)

    def _all_ranks_here(self) -> None:
        seat = self.seat
        # Before the second step DDP has not settled its buckets: no planned boundary there.
        word = seat.version + self._step >= 2
        held = seat.channel.inbox.hold_generation if word else -1
        snapshot = seat.channel.inbox.snapshot if word else -1
        if seat.alone:
            self._hold, self._snapshot = held, snapshot
            return
        # Words of all ranks, and of each the least and the greatest.
        mine = (
            seat.tick,
            seat.generation,
            zlib.crc32(self.running.encode()),
            held,
            snapshot,
        )
        rates = _rates(seat.optimizers.values())
        words = seat.agreement.words(self._about_to, rates)
        if seat.injector:
            seat.injector.point("in_fence", seat.version)
        low, high = groups.fence((*mine, *words))
        if seat.aborted():  # and what was heard means nothing
            raise ConnectionAbortedError("aborted in the fence")
        if low[:3] != high[:3]:
            raise UsageError(
                f"rank {seat.rank} is in {self.running!r} (tick {seat.tick}) while another rank is "
                "in another step or section",
                hint="all ranks must call the same steps and sections in the same order",
            )
        differs = seat.agreement.judge(self.running, low[5:], high[5:])
        if differs:
            table = seat.agreement.table(self._about_to, rates)
            self.recovery.diverged(differs, self.running, table=table, agreed=seat.version)
        self._compare_replicas()
        # One planned move runs at a time; a lower number is of one that has been given up.
        self._hold = high[3]
        self._snapshot = high[4]

    def _compare_replicas(self) -> None:
        """The state as of the entry of this transaction: it has not been changed since, or the
        fence would not be where it is."""
        seat = self.seat
        replicated = seat.replicated
        if not replicated.due(seat.tick):
            return
        undisturbed = not replicated.fresh or seat.generation == 0
        mine = replicated.found(full=replicated.fresh or seat.tick in EARLY)
        if replicated.judge(self._gather(mine)):
            table = replicated.table()
            names = replicated.judge(self._gather(table))
            if undisturbed:
                found, names = names, replicated.settle(names)
                if names != found:  # more of this rank's own than was published
                    seat.publisher.publish(seat.tick + 1, self._side_state())
            if names:
                agreed = replicated.agreed
                self.recovery.diverged("replicas", self.running, table=table, agreed=agreed)
                replicated.ignored |= {name.partition("|")[0] for name in names}
        replicated.fresh, replicated.agreed = False, seat.version

    def _gather(self, mine: dict[str, str]) -> list[dict[str, str]]:
        found = groups.gather(msgspec.msgpack.encode(mine))
        if self.seat.aborted():
            raise ConnectionAbortedError("aborted in the fence")
        return [msgspec.msgpack.decode(one) for one in found]

    def _fence_failed(self, error: BaseException) -> None:
        in_fence, undo = self._in_fence, self._undo
        verdict = self.recovery.interrupted(
            error, in_fence=in_fence, roll_back=lambda: self._roll_back(undo)
        )
        if verdict != "COMMIT":
            raise Retry
        self.recovery.owed_by = self.running

    def _commit(self, site: str, step: bool, result: Any) -> None:
        seat = self.seat
        hold, snapshot = self._hold, self._snapshot
        late = seat.variables.late()
        self._end()
        kept, found, why = results.keep(result)
        if why and site not in seat.tracker.unkept:
            seat.tracker.unkept[site] = why
            seat.warn(
                f"the result of {site!r} cannot be carried to another process ({why}): a newcomer "
                "whose script uses it is stopped"
            )
        if isinstance(found, results.Coming) and not self._updating:
            found = found.read()  # the device had come to the fence
        encoded = found if isinstance(found, bytes) else None
        mark = ""
        if found is None and not why and not (self._updating and results.waits(kept)):
            mark = results.mark(kept)
        foreseen = encoded is not None and encoded == self._result
        if site in self._foresight:
            self._foresight[site].at_end(result, encoded)
        variables = late if late is not None else self._variables
        coming = found.read if isinstance(found, results.Coming) else encoded
        seat.tracker.commit(site, step, kept, coming, variables, mark)
        if mark and not self._updating:
            encoded = results.whole(kept)
        seat.side.publish_late(site, encoded, late, foreseen, "" if self._updating else mark)
        version = seat.version
        if step and (version == NAMED_AT or version % NAMED_EVERY == NAMED_AT):
            for text in (*seat.variables.warnings(), *seat.variables.unknown()):
                seat.warn(text)
        if step:
            seat.redundancy.updated = self._updated
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
            self._own.disturbed()

    def _take_checkpoint(self, number: int) -> None:
        if self.seat.periodic is not None and not self.seat.aborted():
            self.seat.periodic.take(number)

    def _end(self) -> None:
        self._guard.close()
        self.seat.publisher.ahead.wait()
        self.running = ""
        self._function = None
        self.seat.variables.end()
        for loop in self.seat.loops:
            loop.settle()
        self._passed = self.seat.tracker.behind_fence = False
        self.seat.tracker.in_txn = False
        self.seat.injector.end()


def _rates(optimizers: Iterable[torch.optim.Optimizer]) -> list[list[Any]]:
    """Learning rates; one that lies on a device is not waited for."""
    return [[_rate(group.get("lr")) for group in o.param_groups] for o in optimizers]


def _rate(rate: Any) -> Any:
    if isinstance(rate, torch.Tensor):
        return rate.tolist() if rate.device.type == "cpu" else "on a device"
    return rate
