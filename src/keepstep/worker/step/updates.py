"""Optimizer updates: the fence stands in front of the first one of a step.

Where the device can hold an update back that is queued already (guard.py), the fence is met behind
it, in the post-hook.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from keepstep.errors import UsageError
from keepstep.worker.device import cuda, guard
from keepstep.worker.script import refusals
from keepstep.worker.state import loose
from keepstep.worker.step.fencing import Fencing, rate
from keepstep.worker.step.recovery import Retry

TRAIN_INSIDE = "forward, backward and optimizer.step() belong into one @ks.step function"


class Updates:
    def __init__(self, fencing: Fencing) -> None:
        self.live, self.call, self._fencing = fencing.live, fencing.call, fencing
        self._attached = {id(o): n for n, o in fencing.live.optimizers.items()}
        self._counts: dict[str, int] = {}  # how many parameters have been looked at
        register_optimizer_step_pre_hook(self.before)
        register_optimizer_step_post_hook(self._after)

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.call.finishing is not None:
            code = getattr(self.call.function, "code", None)
            arguments = getattr(self.call.function, "arguments", {}).values()
            self.call.finishing.fence(code, self.live.parameters, arguments)
            self.call.finishing.before_update(optimizer)
        if self.call.warming or self.live.rebuilding:
            return
        if not self.call.site:
            self._refuse_outside(optimizer)
            return
        refusals.inside_backward(optimizer, self.call.site)
        if id(optimizer) not in self._attached:
            raise UsageError(
                f"{type(optimizer).__name__}.step() in {self.call.site!r}, but it was not attached",
                hint="give every optimizer to keepstep.attach",
            )
        if kwargs.get("closure") is not None or any(callable(a) for a in args[1:]):
            raise UsageError(
                f"optimizer.step(closure) in {self.call.site!r} cannot be protected",
                hint="compute loss and gradients first, then call step() without a closure",
            )
        if not self.call.step:
            raise UsageError(
                f"{type(optimizer).__name__}.step() inside section {self.call.site!r}",
                hint="optimizer updates belong into a @ks.step function",
            )
        name = self._attached[id(optimizer)]
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._counts.get(name) != count:
            self._counts[name] = count
            loose.refuse(self.live.models.values(), {name: optimizer})
        self.live.gradients.before_update()
        if self.call.fenced:
            self.live.redundancy.before_update(name)
            self.insist()
        else:
            self._fence(optimizer)
        self.call.updated.append(name)

    def _refuse_outside(self, optimizer: Any) -> None:
        """Not if it changes nothing: a call that keeps schedulers quiet, or with a learning rate of
        zero, by which torch makes the state of an optimizer."""
        groups_ = optimizer.param_groups
        graded = any(p.grad is not None for group in groups_ for p in group["params"])
        if graded and any(rate(group.get("lr", 1)) != 0 for group in groups_):
            raise UsageError(
                f"{type(optimizer).__name__}.step() outside of any @ks.step",
                hint=TRAIN_INSIDE,
            )

    def _fence(self, optimizer: Any) -> None:
        self.call.about_to = self._attached[id(optimizer)]
        # Whoever compares states waits for the device, which must then not wait for the host.
        replicated = self.live.replicated
        compared = replicated.due(self.live.tick) or replicated.unmet
        guarded = not compared and self._fencing.guard.suits(optimizer)
        self._fencing.publish(updating=True)
        if guarded and self._fencing.guard.begin(optimizer, self.live.aborted):
            self.live.changes.queued()
            return  # the rest of the fence is in the post-hook
        self._fencing.meet(cuda.wait_for_queue)
        self.begins()
        self._fencing.guard.rehearse(optimizer)

    def _after(self, optimizer: Any, _: Any, __: Any) -> None:
        self._decide(optimizer)
        self._fencing.placement.restore(optimizer)
        name = self._attached.get(id(optimizer), "")
        if self.call.finishing is not None:
            self.call.finishing.after_update()
            self.live.boundary.put_updated(name)
        if self.call.site and not self.call.warming:
            self.live.changes.updated()
            if name:
                self.live.boundary.updated(name)

    def _decide(self, optimizer: Any) -> None:
        """The update is queued, and if it is guarded the device holds it back: decide it."""
        if not self._fencing.guard.end(optimizer):
            return
        try:
            met = self._fencing.meet(self._fencing.guard.wait)
            went = met and self._fencing.guard.decide(guard.GO)
        finally:
            self._fencing.guard.close()
        if not went:  # to be committed all the same, and the gradients are as they were
            guard.apply_unguarded(optimizer)
        self.begins()

    def begins(self) -> None:
        live = self.live
        if live.injector and self.call.step:
            live.injector.point("in_optimizer", live.version, live.parameters[0])

    def insist(self) -> None:
        """What the fence raised was for us: an `except:` of the user's must not swallow it."""
        if self._fencing.guard.close():
            raise UsageError(
                f"an exception inside the optimizer's step was caught in {self.call.site!r}",
                hint="let it leave the step: what the optimizer has done cannot be known",
            )
        if not self.call.passed:
            raise self.call.refused or Retry
