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
    for version in range(LATE):
        watch.look("step", version)
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
    watch.look("step", LATE)
    assert list(found) == ["script/ema"]


def test_what_is_carried_is_where_the_parameters_are_now() -> None:
    model = nn.Linear(4, 2)
    watch, found = watching(model)
    in_place(model)
    watch.look("step", LATE)
    save, load = found["script/ema"]
    anew(model)
    assert torch.equal(save()["weight"], model.weight)
    load({"weight": torch.zeros(2, 4), "bias": torch.ones(2)})
    assert model.weight.eq(0).all() and model.bias.eq(1).all()


def test_a_newcomer_looks_when_all_others_do() -> None:
    """It has been told of the call that it is about to make."""
    watch, _ = watching(nn.Linear(4, 2))
    newcomer, _ = watching(nn.Linear(4, 2))
    newcomer.calls = dict(watch.calls)
    newcomer.look("step", LATE - 1)
    assert newcomer.calls == watch.calls
    for one in (watch, newcomer):
        one.look("step", LATE)
    assert newcomer.calls == watch.calls == {"step": (LATE + 1, LATE)}


def moved(model: Any) -> None:
    model.weight.data = model.weight.data.clone()


@pytest.mark.parametrize("size", SIZES)
def test_a_model_that_lies_elsewhere_and_is_the_same_has_not_changed(size: int) -> None:
    model = nn.Linear(size, 2)
    watch, found = watching(model)
    read: list[int] = []
    watch._content = lambda tensor: read.append(tensor.numel()) or content(tensor)  # type: ignore[func-returns-value]
    moved(model)
    watch.look("step", LATE)
    assert found == {}
    assert (read == []) == (size > 4), "a large one is not read for that"


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("cache", torch.ones(2))
        self.register_buffer("edges", torch.eye(2).to_sparse())


def test_buffers_come_go_and_grow_and_sparse_ones_are_left_to_the_script() -> None:
    model: Any = Cached()
    watch, found = watching(model)
    in_place(model)
    watch.look("step", LATE)
    save, load = found["script/ema"]
    assert list(save()) == ["weight", "cache"]
    grown = {"weight": torch.zeros(2), "cache": torch.zeros(5)}
    load(grown)
    assert torch.equal(model.cache, torch.zeros(5))
    model.cache = None
    assert list(save()) == ["weight"]
    load(grown)
    assert torch.equal(model.cache, torch.zeros(5))
    load({"weight": torch.zeros(2)})
    assert model.cache is None
    load({"cache": torch.zeros(5)})
    assert torch.equal(model.weight, torch.zeros(2)) and "weight" not in model._buffers


@pytest.mark.parametrize("size", SIZES)
def test_what_a_first_call_has_changed_is_put_back_if_it_is_tried_again(size: int) -> None:
    model = nn.Linear(size, 2)
    before = model.weight.detach().clone()
    found: Found = {}
    watch = unasked.Unasked(
        lambda: roots.Roots({"ema": model}, {}),
        lambda _: False,
        content,
        lambda name, save, load: found.update({name: (save, load)}),
        {},
    )
    watch.look("step", 0)
    in_place(model)
    assert watch.undo() == "" and torch.equal(model.weight, before)
    watch.look("step", 1)
    assert found == {}, "it is as it was"
    in_place(model)
    watch.look("step", 2)
    assert list(found) == ["script/ema"]


def test_what_cannot_be_put_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 2)
    watch, _ = watching(model)
    assert watch.undo() == ""
    in_place(model)
    assert watch.undo() == "ema", "no copy is made in later calls"
    monkeypatch.setattr(unasked, "COPIED_BYTES_MAX", 10)
    put_back = watch.before_warm_up()
    in_place(model)
    assert put_back() == "ema"


def test_a_warm_up_leaves_no_trace_in_models_and_attributes_of_optimizers() -> None:
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    optimizer: Any = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer.t = 0
    watch = unasked.Unasked(
        lambda: roots.Roots({"ema": model}, {}),
        lambda _: False,
        content,
        lambda *_: None,
        {"0": optimizer},
    )
    put_back = watch.before_warm_up()
    in_place(model)
    optimizer.t, optimizer.later = 2, 1
    assert put_back() == ""
    assert torch.equal(model.weight, before) and optimizer.t == 0
    assert not hasattr(optimizer, "later")


class Method(nn.Module):
    """The user's student is attached, and trained; the teacher has a center from its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 2), nn.Linear(4, 2)
        self.register_buffer("center", None)


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_only_what_nobody_carries_is_put_back(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unasked, "COPIED_BYTES_MAX", room)
    method: Any = Method()
    carried = {id(method.student), *map(id, method.student.parameters())}
    watch = unasked.Unasked(
        lambda: roots.Roots({"method": method}, {}),
        lambda thing: id(thing) in carried,
        content,
        lambda *_: None,
        {},
    )
    put_back = watch.before_warm_up()
    in_place(method.student)
    assert put_back() == "", "the student is not this one's business"
    method.center = torch.ones(2)
    assert put_back() == ("" if room else "method")
    assert (method.center is None) == bool(room)


def test_a_section_does_not_put_back_what_a_step_found() -> None:
    model = nn.Linear(4, 2)
    watch = unasked.Unasked(
        lambda: roots.Roots({"ema": model}, {}), lambda _: False, content, lambda *_: None, {}
    )
    watch.look("step", 0)
    in_place(model)
    watch.look_at_models()
    weight = model.weight.detach().clone()
    assert watch.undo() == "" and torch.equal(model.weight, weight)


def test_models_that_are_not_here_are_left_alone() -> None:
    with torch.device("meta"):
        skeleton: nn.Module = nn.Sequential(nn.Linear(4, 2), nn.LazyLinear(3, device="cpu"))
    watch, found = watching(skeleton)
    assert watch.before_warm_up()() == "" and found == {}
