"""Models that the script keeps and nobody attached: when they are found, and what is carried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.worker.script import roots, unasked
from keepstep.worker.state.parameters import content

LATE = 20  # a call in which nobody looks at everything
SIZES = [4, unasked.HASHED_BYTES_MAX]  # elements: read in every step, and sampled

Found = dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]


def watching(model: nn.Module) -> tuple[unasked.Unasked, Found]:
    found: Found = {}
    watch = unasked.Unasked(
        lambda: roots.Roots({"ema": model}, {}),
        lambda _: False,
        content,
        lambda name, save, load: found.update({name: (save, load)}),
        {},
    )
    for _ in range(LATE):
        watch.look("step")
    assert found == {}, "it has not changed"
    return watch, found


def in_place(model: Any) -> None:
    model.weight.data.mul_(0.9)


def anew(model: Any) -> None:
    model.weight.data = model.weight.data * 0.9


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("change", [in_place, anew])
def test_a_change_that_no_version_counts_is_seen_at_once(
    size: int, change: Callable[[Any], None]
) -> None:
    model = nn.Linear(size, 2)
    watch, found = watching(model)
    change(model)
    watch.look("step")
    assert list(found) == ["script/ema"]


def test_what_is_carried_is_where_the_parameters_are_now() -> None:
    model = nn.Linear(4, 2)
    watch, found = watching(model)
    in_place(model)
    watch.look("step")
    save, load = found["script/ema"]
    anew(model)
    assert torch.equal(save()["weight"], model.weight)
    load({"weight": torch.zeros(2, 4), "bias": torch.ones(2)})
    assert model.weight.eq(0).all() and model.bias.eq(1).all()
