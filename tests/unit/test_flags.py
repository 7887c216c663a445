"""Flags that decide what a step computes are saved and put back."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn

from keepstep.worker.state.flags import Flags


def test_flags_are_put_back() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    ddp = SimpleNamespace(
        require_forward_param_sync=True, require_backward_grad_sync=True, training=True
    )
    flags = Flags({"m": net}, list(net.parameters()), lambda: {"0": ddp})
    saved = flags.save()
    net[0].weight.requires_grad_(False)
    net.eval()
    ddp.require_forward_param_sync = False
    assert flags.save() != saved
    flags.load(saved)
    assert flags.save() == saved
    assert net[0].weight.requires_grad and net[1].training and ddp.require_forward_param_sync
