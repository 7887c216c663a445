"""Gradients that live longer than a step.

Theory of operation
-------------------
As a rule gradients are used up by the update of the step that computed them, and a retry or a
newcomer only has to know which of them exist. Not so where steps add them up (one @ks.step per
micro-batch), or where a second optimizer updates every third time. A gradient is *alive* if it is
there and not zero when a step's first backward pass begins: that pass adds to it. A copy is made
right then, before the pass touches it, so that a retry finds it again; and from then on the
parameter is known to be one whose gradients outlive a step, and they travel: with the side state,
because they may be this rank's own, or from a replica where this rank has published none.

Whether a gradient is zero is looked up in full in the first steps and now and then later, and
otherwise by a sample; on a device, where looking waits, only in those steps.
"""

from __future__ import annotations

from typing import Final

import torch

from keepstep.worker.state import shards

ABSENT: Final = 0
ZERO: Final = 1
ALIVE: Final = 2

DEEP_FIRST, DEEP_EVERY = 4, 64
SAMPLE = 4096  # elements


class Gradients:
    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.outliving: set[int] = set()  # indices of parameters
        self.carrying = False  # the last step left gradients without an update
        self._had: list[bool] = []
        self._kept: dict[int, torch.Tensor] = {}
        self._began = False  # a backward pass of this transaction
        self._steps = 0

    # ------------------------------------------------------------------ the life of a step

    def enter(self) -> None:
        self._steps += 1
        self._began = False
        self._had = [p.grad is not None for p in self._parameters]
        self._kept = {}
        if self.carrying or self.outliving:
            for index, parameter in enumerate(self._parameters):
                if parameter.grad is not None and (self.carrying or index in self.outliving):
                    self._kept[index] = parameter.grad.detach().clone()

    def before_backward(self) -> None:
        """The first pass of the transaction begins; `enter` has copied what was known by then."""
        if self._began:
            return
        self._began = True
        found = [i for i, p in enumerate(self._parameters) if p.grad is not None]
        suspects = [i for i in found if i not in self._kept and self._alive(i)]
        if suspects:
            for index in found:
                if index not in self._kept and self._alive(index, deep=True):
                    gradient = self._parameters[index].grad
                    assert gradient is not None
                    self._kept[index] = gradient.detach().clone()
                    self.outliving.add(index)

    def before_update(self) -> None:
        """An update without a pass before it uses what earlier steps have left."""
        if not self._began:
            self.outliving |= {
                i for i, p in enumerate(self._parameters) if p.grad is not None and self._alive(i)
            }

    def _alive(self, index: int, deep: bool = False) -> bool:
        gradient = self._parameters[index].grad
        assert gradient is not None
        deep = deep or self._steps <= DEEP_FIRST or self._steps % DEEP_EVERY == 0
        if gradient.device.type != "cpu" and not deep:
            return index in self.outliving
        return alive(gradient, deep)

    def undo(self) -> None:
        for index, parameter in enumerate(self._parameters):
            kept = self._kept.get(index)
            if not self._had[index]:
                parameter.grad = None
            elif kept is not None and parameter.grad is not None and parameter.grad._is_view():
                parameter.grad.copy_(kept)  # of DDP's bucket, and to remain one (buckets.py)
            elif kept is not None:
                parameter.grad = kept.clone()
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif self._began:
                _zero(parameter.grad)

    # ------------------------------------------------------------------ travelling

    def to_carry(self, updating: bool) -> dict[int, torch.Tensor]:
        """At the fence: those that the next step may find alive, by parameter."""
        found = {
            i: shards.local(p.grad).detach()
            for i, p in enumerate(self._parameters)
            if p.grad is not None and (not updating or i in self.outliving)
        }
        return {i: g for i, g in found.items() if not g.is_sparse and alive(g, True)}

    def put(self, carried: dict[int, torch.Tensor]) -> None:
        for index, gradient in carried.items():
            parameter = self._parameters[index]
            if parameter.grad is not None:  # maybe a view of a bucket, and to remain one
                shards.local(parameter.grad).copy_(gradient)
            else:
                part = gradient.to(parameter.device)
                parameter.grad = shards.wrap(part, shards.spec(parameter))


def alive(gradient: torch.Tensor, deep: bool) -> bool:
    part = shards.local(gradient).detach()
    if part.is_sparse:
        return part._nnz() > 0
    if not deep and part.numel() > SAMPLE:
        part = part.view(-1)[:SAMPLE] if part.is_contiguous() else part
    return bool(part.any())


def kind(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return ABSENT
    return ALIVE if alive(gradient, True) else ZERO


def _zero(gradient: torch.Tensor) -> None:
    if gradient.grad_fn is not None:
        gradient.detach_()
    else:  # DDP's gradient_as_bucket_view: views cannot be detached in place
        gradient.requires_grad_(False)
    gradient.zero_()
