"""What a registered object saves must come back from its load, and the check leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from keepstep.errors import UsageError
from keepstep.worker.state import roundtrip
from keepstep.worker.state.objects import registered


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.1)


class Adding:
    """A scheduler in Megatron's way: its load calls step(increment=num_steps)."""

    def __init__(self, optimizer: torch.optim.Optimizer, num_steps: int = 0) -> None:
        self.optimizer, self.num_steps = optimizer, 0
        self.step(num_steps)

    def step(self, increment: int = 1) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0 / (1 + self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"max_lr": 1.0, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step(state["num_steps"])


def check(target: Any, load: Any = None, *optimizers: torch.optim.Optimizer) -> None:
    roundtrip.check(registered("it", target, load, per_rank=False), optimizers)


@pytest.mark.parametrize(("steps", "words"), [(12, "num_steps 12 -> 24"), (0, "num_steps 0 -> 1")])
def test_load_that_adds_is_refused_even_at_zero(steps: int, words: str) -> None:
    with pytest.raises(
        UsageError, match=f"load of 'it' does not restore .* key {words}"
    ) as refused:
        check(Adding(optimizer(), steps))
    assert "add nothing" in refused.value.hint


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=10),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
        ),
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
        lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
    ],
)
def test_schedulers_of_torch_pass_and_go_on_as_before(make: Any) -> None:
    rates = []
    for checked in (False, True):
        torch.manual_seed(0)
        mine = optimizer()
        scheduler = make(mine)
        if checked:
            check(scheduler, None, mine)
        seen = []
        for _ in range(6):
            mine.step()
            more = (1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
            scheduler.step(*more)
            seen.append(mine.param_groups[0]["lr"])
        rates.append(seen)
    assert rates[0] == rates[1]


def test_scaler_and_averages_pass() -> None:
    check(torch.amp.GradScaler("cpu", init_scale=8.0))
    check(torch.amp.GradScaler("cpu", enabled=False))
    check(torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)))
    check(nn.BatchNorm1d(3))


def test_random_streams_are_left_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()

    def load(state: Any) -> None:
        torch.manual_seed(state)
        random.random()

    check(lambda: 7, load)
    check(random.getstate, random.setstate)
    check(lambda: {"rng": torch.get_rng_state()}, lambda s: torch.set_rng_state(s["rng"]))
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


def test_the_very_tensors_stay_where_load_takes_what_it_is_given() -> None:
    kept = {"average": torch.ones(3), "count": torch.tensor(4)}
    held = dict(kept)
    check(lambda: dict(kept), kept.update)
    assert all(kept[name] is held[name] for name in held)
    assert torch.equal(kept["average"], torch.ones(3)) and kept["count"].item() == 4


def test_hyperparameters_are_as_before() -> None:
    mine = optimizer()
    mine.param_groups[0]["lr"] = torch.tensor(0.25)
    rate = mine.param_groups[0]["lr"]

    def load(state: float) -> None:
        mine.param_groups[0]["lr"].fill_(state)
        mine.param_groups[0]["momentum"] = state

    check(lambda: 0.5, load, mine)
    assert mine.param_groups[0]["lr"] is rate and rate.item() == 0.25
    assert "momentum" not in mine.param_groups[0]


@pytest.mark.parametrize(
    ("save", "load", "words"),
    [
        (iter([{"n": 1}, {"n": 1}, {"n": 2}]).__next__, lambda s: None, "another state every time"),
        (lambda: {"n": [1, 2.5]}, lambda s: 1 / 0, "does not take what save gave: ZeroDivision"),
    ],
)
def test_other_broken_pairs_are_named(save: Any, load: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(save, load)


def test_a_tensor_that_is_added_to_is_named() -> None:
    total = torch.zeros(2)
    with pytest.raises(UsageError, match=r"key total float32\[2\] -> float32\[2\]"):
        check(lambda: {"total": total}, lambda s: total.add_(s["total"]))


def test_minus_zero_is_not_zero() -> None:
    box = [-0.0]
    with pytest.raises(UsageError, match=r"-0\.0 -> 0\.0"):
        check(lambda: {"x": box[0]}, lambda s: box.__setitem__(0, s["x"] + 0.0))
