"""FSDP2 (`fully_shard`) after a forward or backward that was interrupted.

An exception leaves it in the middle: parameters gathered, gradients of whole parameters alive,
queues filled. The next iteration would fail, or worse add what is left to its own gradients. torch
has `reset_iter_state` for that (2.13), which waits for collectives that have failed here and keeps
the gradients of gathered parameters; so those are dropped around it.

Call with nothing of the old groups in flight (groups.go_solo has returned).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from keepstep.errors import UsageError


def refuse_old(models: Iterable[nn.Module]) -> None:
    for model in models:
        for module in model.modules():
            if isinstance(module, FullyShardedDataParallel):
                raise UsageError(
                    "attach: FullyShardedDataParallel (FSDP1) cannot be protected",
                    hint="shard the model with torch.distributed.fsdp.fully_shard",
                )


def modules(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def groups(module: Any) -> list[Any]:
    """The parameter groups of one FSDPModule."""
    return _groups(module._get_fsdp_state())


def hooks(model: nn.Module) -> Iterator[Any]:
    """What the user has put in the way of gradients (set_all_reduce_hook)."""
    for module in modules(model):
        for group in _groups(module._get_fsdp_state()):
            hook = getattr(group, "_all_reduce_hook", None)
            if hook is not None:
                yield hook


def reshard(model: nn.Module) -> None:
    """Show the shards again where a forward without a backward left parameters gathered."""
    for module in modules(model):
        module.reshard()


def reset(models: Iterable[nn.Module]) -> None:
    for model in models:
        roots = [m for m in modules(model) if m._get_fsdp_state()._is_root]
        for root in roots:
            _reset(root)


def _reset(root: Any) -> None:
    state = root._get_fsdp_state()
    groups = [g for one in state._state_ctx.all_states for g in _groups(one)]
    for group in groups:
        gathered = group._all_gather_result
        if gathered is not None and gathered.all_gather_work is not None:
            with contextlib.suppress(Exception):  # of the old generation: failed, and over
                gathered.all_gather_work.wait()
        group._all_gather_result = None
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_by_hand(state, groups)
    for group in groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _groups(state: Any) -> list[Any]:
    """One per module before torch 2.12, several since."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _reset_by_hand(state: Any, groups: list[Any]) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    shared = state._comm_ctx
    shared.all_gather_state = None
    for name in ("reduce_scatter_state", "_last_post_reduce_event"):
        if hasattr(shared, name):
            setattr(shared, name, None)
    for name in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
        if hasattr(shared, name):
            getattr(shared, name).clear()
    for one in state._state_ctx.all_states:
        if hasattr(one, "_modules_to_run_forward"):
            one._modules_to_run_forward.clear()
        one._training_state = TrainingState.IDLE
    for group in groups:
        for name in (
            "_post_reduce_event",
            "_all_reduce_state",
            "_reshard_after_forward_event",
            "_partial_reduce_output",
        ):
            if hasattr(group, name):
                setattr(group, name, None)
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
