"""What the user registers besides model and optimizer, and what a step must be able to undo."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from keepstep.errors import UsageError
from keepstep.worker import codec, shards

SNAPSHOT_BYTES_MAX = 64 << 10


class Registered:
    """A named piece of state: an object with state_dict/load_state_dict, or a (save, load) pair.

    `per_rank` state differs between ranks, travels in the side state, and may be changed only
    before the optimizer's update; other state must be equal on all replicas at every boundary.
    """

    def __init__(
        self,
        name: str,
        save: Callable[[], Any],
        load: Callable[[Any], Any],
        *,
        per_rank: bool = False,
        scaler: Any = None,
    ) -> None:
        self.name = name
        self.save = save
        self.load = load
        self.per_rank = per_rank
        self._scaler = scaler
        self.after_update: Callable[[], Any] | None = None  # called at the end of every step
        # Large state is not copied at every step: it may be changed only after the update.
        data, tensors = codec.dumps(save())
        size = len(data) + sum(shards.local(tensor).nbytes for tensor in tensors)
        self.undoable = size <= SNAPSHOT_BYTES_MAX

    def snapshot(self) -> bytes | None:
        return codec.dumps_inline(self.save()) if self.undoable or self.per_rank else None

    def undo(self, snapshot: bytes | None) -> None:
        if snapshot is not None:
            self.load(codec.loads_inline(snapshot))
        if self._scaler is not None:
            # GradScaler refuses a second unscale_ until update(); an aborted step never got there.
            self._scaler._per_optimizer_states = defaultdict(_fresh_scaler_state)


def _fresh_scaler_state() -> dict[str, Any]:
    from torch.amp.grad_scaler import _refresh_per_optimizer_state

    return _refresh_per_optimizer_state()


def registered(name: str, target: Any, load: Any, *, per_rank: bool) -> Registered:
    if load is not None:
        if not callable(target) or not callable(load):
            raise UsageError(
                f"register({name!r}, save, load) needs two functions",
                hint="save() returns plain state, load(state) takes it back",
            )
        return Registered(name, target, load, per_rank=per_rank)
    save, load = getattr(target, "state_dict", None), getattr(target, "load_state_dict", None)
    if not callable(save) or not callable(load):
        raise UsageError(
            f"cannot register {name!r}: {type(target).__name__} has no state_dict/load_state_dict",
            hint="use ks.register(name, save, load)",
        )
    scaler = target if hasattr(target, "_per_optimizer_states") else None
    return Registered(name, save, load, per_rank=per_rank, scaler=scaler)


class Undo:
    """begin(k): everything a retry of the transaction must find as it was."""

    def __init__(
        self,
        rng: bytes,
        parameters: list[torch.nn.Parameter],
        optimizers: list[torch.optim.Optimizer],
        objects: list[Registered],
        buffers: dict[str, torch.Tensor],
        carrying: bool = False,
    ) -> None:
        self.rng = rng
        self.buffers = buffers
        self._parameters = parameters
        self._had_grad = [p.grad is not None for p in parameters]
        # Gradients at a boundary are about to be zeroed, unless several steps add them up.
        self._grads = [
            p.grad.detach().clone() if carrying and p.grad is not None else None for p in parameters
        ]
        self._groups = [
            [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
            for o in optimizers
        ]
        self._optimizers = optimizers
        self._objects = [(o, o.snapshot()) for o in objects]

    def undo_gradients_and_objects(self) -> None:
        for parameter, had, carried in zip(
            self._parameters, self._had_grad, self._grads, strict=True
        ):
            if not had:
                parameter.grad = None
            elif carried is not None and parameter.grad is not None and parameter.grad._is_view():
                parameter.grad.copy_(carried)  # of DDP's bucket, and to remain one (buckets.py)
            elif carried is not None:
                parameter.grad = carried.clone()
            elif parameter.grad is not None:
                if parameter.grad.grad_fn is not None:
                    parameter.grad.detach_()
                else:  # DDP's gradient_as_bucket_view: views cannot be detached in place
                    parameter.grad.requires_grad_(False)
                parameter.grad.zero_()
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(saved)
        for obj, snapshot in self._objects:
            obj.undo(snapshot)
