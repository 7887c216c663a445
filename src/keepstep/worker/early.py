"""Gradients that go to the vault before the fence, while the backward pass computes.

Each is final, as a rule, when it was accumulated for the last time in a step. A hook puts it then
(FSDP2 calls the same hook when it has reduced a shard); which backward pass is a step's last one is
guessed from the step before. Nobody tells when a gradient is changed afterwards: versions of
tensors do not count writes through `.data`, collectives or foreign kernels. So at the fence what is
there now is compared with what was sent, by its digest. What differs is put again, under the same
version, and takes the place of the early one: a wrong guess costs time and nothing else.

The line copies what is put early before it sends it, so that memory which is written to meanwhile
does not break the digest. Hooks run in the main thread or, while that waits for a backward pass, in
threads of autograd's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xxhash

from keepstep.worker.vault import VaultLine

PAUSE = 64  # steps without a guess after a wrong one


class Early:
    def __init__(self, view: Callable[[torch.Tensor], memoryview]) -> None:
        self._view = view
        self._line: VaultLine | None = None  # open for puts
        self._version = -1
        self._sent_by: VaultLine | None = None
        self._sent: dict[int, int] = {}  # unit -> ticket
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
        self._sent[unit] = line.put_grad(unit, self._version, self._view(gradient), early=True)

    # ------------------------------------------------------------------ at the fence

    def order(self, unit: int) -> int:
        """What was sent first can be compared first."""
        return self._sent.get(unit, -1)

    def holds(self, line: VaultLine, unit: int, gradient: torch.Tensor | None) -> bool:
        """Whether the vault has this gradient, or will have all that was put before it."""
        ticket = self._sent.get(unit)
        if ticket is None or line is not self._sent_by:
            return False
        if gradient is not None and self._digest(gradient) == line.digest_sent(ticket):
            return True
        self._wrong = True
        return False

    def _digest(self, gradient: torch.Tensor) -> bytes:
        return xxhash.xxh3_128_digest(self._view(gradient))


def same_kind(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.dtype == parameter.dtype
