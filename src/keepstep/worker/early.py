"""Gradients that go to the vault before the fence, while the backward pass computes.

Each is final, as a rule, when it was accumulated for the last time in a step. A hook puts it then
(FSDP2 calls the same hook when it has reduced a shard); which backward pass is a step's last one is
guessed from the step before. Nobody tells when a gradient is changed afterwards: versions of
tensors do not count writes through `.data`, collectives or foreign kernels. So at the fence what is
there now is compared with what was sent, by its digest. What differs is put again, under the same
version, and takes the place of the early one: a wrong guess costs time and nothing else.

Clipping by the norm multiplies nearly all gradients of a step by one number. It is recognised, the
number goes into the step's note, and whoever replays the step multiplies by it in the same way.

The line copies what is put early before it sends it, so that memory which is written to meanwhile
does not break the digest. Hooks run in the main thread or, while that waits for a backward pass, in
threads of autograd's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from keepstep.worker import shards
from keepstep.worker.vault import VaultLine

PAUSE = 64  # steps without a guess after a wrong one

Scales = list[tuple[torch.Tensor, list[int]]]
"""Numbers that gradients of the vault are to be multiplied by, one after the other, and the units
that they belong to."""


@dataclass
class _Sent:
    parameter: torch.Tensor
    ticket: int
    clipped: bytes = b""  # its digest since then


class Early:
    def __init__(self, view: Callable[[torch.Tensor], memoryview]) -> None:
        self._view = view
        self._line: VaultLine | None = None  # open for puts
        self._version = -1
        self._sent_by: VaultLine | None = None
        self._sent: dict[int, _Sent] = {}  # by unit
        self._scales: Scales = []
        self._wrong = False
        self._pause = 0

    def watch(self, unit: int, parameter: torch.nn.Parameter) -> None:
        register: Any = parameter.register_post_accumulate_grad_hook  # untyped in torch
        register(lambda one: self._accumulated(unit, one))

    def forget(self) -> None:
        """A step begins."""
        if self._wrong:
            self._pause = PAUSE
        self._pause = max(self._pause - 1, 0)
        self._line = self._sent_by = None
        self._sent.clear()
        self._scales = []
        self._wrong = False

    def open(self, line: VaultLine, version: int) -> None:
        """The last backward pass of the step begins."""
        if self._pause == 0:
            self._line = self._sent_by = line
            self._version = version

    def close(self) -> None:
        """It is over, or it was not the last one."""
        self._line = None

    def _accumulated(self, unit: int, parameter: torch.Tensor) -> None:
        line, gradient = self._line, parameter.grad
        if line is None or gradient is None or not same_kind(parameter, gradient):
            return
        ticket = line.put_grad(unit, self._version, self._view(gradient), early=True)
        self._sent[unit] = _Sent(parameter, ticket)

    # ------------------------------------------------------------------ clipping

    def clip(self, clip: Callable[[], Any]) -> Any:
        """In place of `clip`, which is about to multiply gradients by a number."""
        line = self._sent_by
        if line is None:
            return clip()
        self.close()
        before = {unit for unit in self._sent if self._unchanged(line, unit)}
        with _Multiplications() as seen:
            result = clip()
        for gradients, scale in seen.found:
            ids = set(map(id, gradients))
            units = [unit for unit in sorted(before) if id(self._sent[unit].parameter.grad) in ids]
            for unit in units:
                self._sent[unit].clipped = self._digest(self._sent[unit].parameter.grad)
            if units:
                self._scales.append((scale.detach().clone(), units))
            before -= set(units)  # multiplied again, it would not be known by what in all
        return result

    # ------------------------------------------------------------------ at the fence

    def order(self, unit: int) -> int:
        """What was sent first can be compared first."""
        sent = self._sent.get(unit)
        return sent.ticket if sent is not None else -1

    def holds(self, line: VaultLine, unit: int, gradient: torch.Tensor | None) -> bool:
        """Whether the vault has this gradient, but for `scales`, or gets it with what was put."""
        if unit not in self._sent or line is not self._sent_by:
            return False
        if gradient is not None and self._unchanged(line, unit):
            return True
        self._wrong = True
        del self._sent[unit]
        return False

    @property
    def scales(self) -> Scales:
        """After `holds` was asked about all."""
        found = [(scale, [u for u in units if u in self._sent]) for scale, units in self._scales]
        return [(scale, units) for scale, units in found if units]

    def _unchanged(self, line: VaultLine, unit: int) -> bool:
        sent = self._sent[unit]
        gradient = sent.parameter.grad
        expected = sent.clipped or line.digest_sent(sent.ticket)
        return gradient is not None and self._digest(gradient) == expected

    def _digest(self, gradient: torch.Tensor | None) -> bytes:
        assert gradient is not None
        return xxhash.xxh3_128_digest(self._view(gradient))


class _Multiplications(TorchFunctionMode):
    """Of many tensors by one, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[list[torch.Tensor], torch.Tensor]] = []

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._foreach_mul_ and not kwargs and isinstance(args[1], torch.Tensor):
            replicated = getattr(args[1], "placements", ())
            if all(placement.is_replicate() for placement in replicated):
                self.found.append((list(args[0]), shards.local(args[1])))
        return func(*args, **(kwargs or {}))


def watch_clipping(early: Early) -> None:
    """`clip_grad_norm_` looks its other half up in its module, wherever it was imported to."""
    inner: Any = clip_grad._clip_grads_with_norm_

    @functools.wraps(inner)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return early.clip(lambda: inner(*args, **kwargs))

    for module, name in (
        (clip_grad, "_clip_grads_with_norm_"),
        (torch.nn.utils, "clip_grads_with_norm_"),
    ):
        setattr(module, name, watched)


@torch.no_grad()
def multiply(gradients: dict[int, torch.Tensor], scales: Iterable[Any]) -> None:
    """What clipping did, to what the vault had; by unit."""
    for scale, units in scales:
        parts = [shards.local(gradients[unit]) for unit in units if unit in gradients]
        for device in {part.device for part in parts}:
            here = [part for part in parts if part.device == device]
            torch._foreach_mul_(here, scale.to(device))


def same_kind(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.dtype == parameter.dtype
