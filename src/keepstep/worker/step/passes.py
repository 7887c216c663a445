"""Collectives and backward passes inside a step, and what is refused of them.

DDP's collectives start in C++: its forward and any backward are where to see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keepstep.errors import UsageError
from keepstep.worker.groups import reducers
from keepstep.worker.script.tree import Txn
from keepstep.worker.state import buckets
from keepstep.worker.step.call import BARE
from keepstep.worker.step.fencing import Fencing
from keepstep.worker.step.updates import TRAIN_INSIDE


class Passes:
    def __init__(self, fencing: Fencing) -> None:
        self.live, self.call, self._fencing = fencing.live, fencing.call, fencing
        self.outside: Callable[[str, bool, Callable[[], Any]], Any] = lambda *_: None
        self._strayed = False  # the last forward of a DDP model ran outside of any transaction
        self._watch_ddp()

    def _watch_ddp(self) -> None:
        ddp: Any = torch.nn.parallel.DistributedDataParallel
        autograd: Any = torch.autograd
        forward, backward, sync = ddp._pre_forward, autograd.backward, ddp._sync_buffers

        def watched_sync(module: Any) -> None:
            if self.call.site or self.call.warming:
                sync(module)
            # else it has been done in a section of its own

        def watched_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.refuse_collective("forward of a DistributedDataParallel model")
            if not self.call.site and not self.call.warming:
                self._buffers_outside(module, lambda: sync(module))
            synced = module.require_backward_grad_sync
            if torch.is_grad_enabled() and self.call.site:
                self.call.forwarded, self._strayed = True, False
            elif torch.is_grad_enabled() and synced and not self.call.warming:
                self.call.forwarded, self._strayed = False, True
            self.live.agreement.collective(f"DDP forward, synchronised: {synced}", ())
            return forward(module, *args, **kwargs)

        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            if self.call.passed and reducers.ddp_modules():
                self.refuse_collective("backward through a DistributedDataParallel model")
            # Inside it may be of another model; a script that trains so does it from the start.
            stray = self._strayed and not self.call.forwarded and not self.call.warming
            if stray and (not self.call.site or self.live.version == 0):
                raise UsageError(
                    "backward through a DistributedDataParallel model whose forward ran outside of "
                    "any step: the collectives in it could not be repeated",
                    hint=TRAIN_INSIDE,
                )
            self.backward_begins()
            result = backward(*args, **kwargs)
            self.live.redundancy.backward_done()
            return result

        ddp._pre_forward, ddp._sync_buffers = watched_forward, watched_sync
        autograd.backward = watched_backward

    def _buffers_outside(self, module: Any, sync: Callable[[], None]) -> None:
        """An evaluation between steps. DDP broadcasts the buffers in its first forward behind a
        training step, in C++: here that is a section. What it does to the buffers is part of the
        state at its fence."""
        names = {id(m): name for name, m in buckets.modules(self.live.parameters).items()}
        site = f"buffers of DistributedDataParallel {names.get(id(module), '')}{BARE}"
        replay = self.live.tracker.replay
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

    def backward_begins(self) -> None:
        """The last pass of a step, going by the step before: what will be published is known."""
        if self.call.site and self.call.step and not self.call.fenced and not self.call.warming:
            self.call.backwards += 1
            self.live.changes.midway(self.call.site)
            if self.call.backwards == 1:
                self._fencing.own.meets()
                self.live.gradients.before_backward()
            last = self.call.backwards == self._fencing.usual.get(self.call.site)
            self.live.redundancy.backward(last)
            if last and self.live.publisher.sends_ahead():
                variables = self.live.variables.capture()
                self.live.side.ahead(
                    self.call.site, self._fencing.foreseen(), variables, self._fencing.rest()
                )

    def saw_collective(self, name: str, args: Any, kwargs: Any) -> None:
        self.refuse_collective(f"collective {name}")
        call = self.call
        if call.site and not (call.step or call.bare or call.warming):
            self.live.changes.collective(call.site)
        given = [*args, *kwargs.values()]
        self.live.agreement.collective(name, [x for x in given if isinstance(x, torch.Tensor)])

    def refuse_collective(self, what: str) -> None:
        if self.call.passed and not self.call.warming:
            raise UsageError(
                f"{what} after the first optimizer update inside step {self.call.site!r}",
                hint="a step is committed when its first update begins: move the collective into a "
                "@ks.section, or split the step in two",
            )
