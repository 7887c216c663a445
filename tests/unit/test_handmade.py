"""Parameters that change in a step without an optimizer are found, whoever changes them how."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from keepstep.errors import UsageError
from keepstep.worker.handmade import FIRST_STEPS, HandmadeUpdates, fingerprint


def large() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1000, 1001))


@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.zeros(3)), large])
@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.data.sub_(0.1),
        lambda p: p.detach().view(-1).sub_(0.1),
        lambda p: setattr(p, "data", p.data - 0.1),
    ],
)
def test_manual_update_is_refused_by_name(
    make: Callable[[], nn.Parameter], change: Callable[[nn.Parameter], None]
) -> None:
    parameter = make()
    witness = HandmadeUpdates({"head.weight": parameter})
    witness.entry("train:3")
    change(parameter)
    with pytest.raises(UsageError, match=r"head\.weight.*'train:3'.*no optimizer"):
        witness.refuse("train:3")


def test_a_step_without_a_change_passes_and_later_ones_cost_nothing() -> None:
    parameter = large()
    witness = HandmadeUpdates({"p": parameter})
    for _ in range(FIRST_STEPS):
        witness.entry("a")
        witness.refuse("a")
    witness.entry("a")
    parameter.data.add_(1)
    witness.refuse("a")  # not looked at


def test_frozen_and_lazy_parameters_are_left_out() -> None:
    frozen, lazy = nn.Parameter(torch.zeros(2), requires_grad=False), nn.LazyLinear(2)
    witness = HandmadeUpdates({"frozen": frozen, "lazy": lazy.weight})
    witness.entry("a")
    frozen.data.add_(1)
    lazy(torch.ones(1, 3))
    witness.refuse("a")


def test_fingerprint_reads_any_layout() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(tensor) != fingerprint(tensor + 1)
    assert fingerprint(tensor[:, ::2]) == fingerprint(tensor.clone()[:, ::2])
    assert fingerprint(torch.zeros(0)) == fingerprint(torch.zeros(0))
