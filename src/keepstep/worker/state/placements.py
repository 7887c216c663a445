"""Gradients of distributed tensors, placed as their parameters before the fence.

Tensor parallel modules give gradients that are placed otherwise than the parameter (Partial for a
norm that is Replicate, Shard for an embedding). The optimizer then redistributes them itself: a
collective behind the fence, which a lost rank cannot be waited for in. `align` does it before the
fence, where a retry repeats it, with the numbers that the optimizer would have got.

`restore` gives the gradients back after the update, so that what the script adds to them later is
added to what it would have been added to without Keepstep.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class GradientPlacement:
    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._spread = [p for p in parameters if isinstance(p, DTensor)]
        self._aligned: dict[int, tuple[Any, Any, Any]] = {}  # parameter, aligned, as it was

    def align(self) -> None:
        """A collective in the same order on all ranks. Costs a comparison where nothing differs."""
        for parameter in self._spread:
            grad: Any = parameter.grad
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                with torch.no_grad():
                    fitting = grad.redistribute(placements=parameter.placements)
                # Redistribution is asynchronous; its end must come before the fence.
                local = fitting._local_tensor
                if hasattr(local, "wait"):
                    fitting._local_tensor = local.wait()
                parameter.grad = fitting
                self._aligned[id(parameter)] = (parameter, fitting, grad)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """After its update, before the script goes on."""
        if not self._aligned:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _, fitting, grad = self._aligned.pop(id(parameter), (None, None, None))
                if fitting is not None and parameter.grad is fitting:
                    parameter.grad = grad

    def forget(self) -> None:
        """A transaction begins: nothing of another one is given back."""
        self._aligned.clear()
