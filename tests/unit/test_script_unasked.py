"""Models that the script keeps and nobody attached: when they are found, and what is carried."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from keepstep.errors import UsageError
from keepstep.worker.script import roots, unasked
from keepstep.worker.state.parameters import content

LATE = 20  # a call in which nobody looks at everything
SIZES = [4, unasked.HASHED_BYTES_MAX]  # elements: read in every step, and sampled

Found = dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]


def keeping(**script: Any) -> tuple[unasked.Unasked, Found]:
    """By a script with these variables."""
    return in_space(script)


def in_space(script: dict[str, Any]) -> tuple[unasked.Unasked, Found]:
    found: Found = {}
    watch = unasked.Unasked(
        lambda: roots.Roots(script, {}),
        lambda _: False,
        content,
        lambda name, save, load, _: found.update({name: (save, load)}),
        found.pop,
        {},
        itertools.count().__next__,
    )
    return watch, found


def watching(model: nn.Module) -> tuple[unasked.Unasked, Found]:
    watch, found = keeping(ema=model)
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
    watch, found = keeping(ema=model)
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
        lambda _: None,
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
        lambda _: None,
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
        lambda: roots.Roots({"ema": model}, {}),
        lambda _: False,
        content,
        lambda *_: None,
        lambda _: None,
        {},
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


def carried(found: Found, name: str) -> torch.Tensor:
    weight: torch.Tensor = found[name][0]()["weight"]
    return weight


def test_a_name_stands_for_the_model_that_its_path_leads_to() -> None:
    student = nn.Linear(4, 2)
    script = {"teacher": copy.deepcopy(student)}
    watch, found = in_space(script)
    watch.look("step", 0)
    script["teacher"] = copy.deepcopy(student)
    watch.look("step", LATE)
    assert found == {}, "it is the same"
    for late in (LATE + 1, LATE + 2):
        in_place(student)
        before = weakref.ref(script["teacher"])
        script["teacher"] = copy.deepcopy(student)
        watch.look("step", late)
        assert before() is None, "what the script lets go of is gone"
        assert torch.equal(carried(found, "script/teacher"), student.weight)
        found["script/teacher"][1]({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)})
        assert script["teacher"].weight.eq(0).all()


@pytest.mark.parametrize("look", ["step", "section"])
def test_a_model_that_is_made_late_is_carried_at_once(look: str) -> None:
    student = nn.Linear(4, 2)
    pool = [copy.deepcopy(student)]
    watch, found = keeping(pool=pool)
    for version in range(LATE):
        watch.look("step", version)
    in_place(student)
    pool.append(copy.deepcopy(student))
    searches: list[int] = []
    search = watch.kept.search
    watch.kept.search = lambda: searches.append(search())  # type: ignore[method-assign, func-returns-value]
    if look == "step":
        watch.look("step", LATE)
    else:
        watch.look_at_models()
    assert list(found) == ["script/pool[1]"] and len(searches) == 1
    nn.Linear(2, 2)
    watch.look("step", LATE + 1)
    assert len(searches) == 1, "one that is gone again is not looked for"


def test_a_model_that_is_let_go_of_is_no_longer_carried_and_is_known_when_it_returns() -> None:
    script = {"teacher": nn.Linear(4, 2), "other": nn.Linear(2, 2)}
    watch, found = in_space(script)
    watch.look("step", 0)
    in_place(script["teacher"])
    watch.look("step", 1)
    assert list(found) == ["script/teacher"]
    phase = {"teacher": script.pop("teacher")}
    watch.look("step", LATE)
    assert carried(found, "script/teacher") is not None, "a newcomer's script still has it here"
    watch.look("step", LATE)
    assert found == {}
    told = watch.export()
    newcomer, expected = in_space({"other": nn.Linear(2, 2), **phase})
    newcomer.load(told)
    script |= phase
    for one in (watch, newcomer):
        one.look("step", unasked.EVERY)
        one.calls["step"] = unasked.EVERY - 1, 0
        one.look("step", 1)
    assert list(found) == list(expected) == ["script/teacher"]


def test_what_is_left_out_is_missed_only_while_the_script_has_it() -> None:
    script: dict[str, Any] = {"student": nn.Linear(4, 2)}
    watch, found = in_space(script)
    watch.look("step", 0)
    script["best"] = copy.deepcopy(script["student"])
    watch.look("step", LATE)
    assert list(found) == ["script/best"]
    found.clear()
    watch.leave_out("script/best")
    for version in (1, 2):
        watch.look("step", LATE + version)
        assert found == {} and watch.left_out == {"script/best"}
    del script["best"]
    watch.look("step", LATE + 3)
    assert found == {} and watch.left_out == set()


def test_a_model_that_moves_to_another_place_is_carried_there() -> None:
    student = nn.Linear(4, 2)
    script: dict[str, Any] = {"pool": [], "teacher": copy.deepcopy(student)}
    watch, found = in_space(script)
    for version in range(LATE):
        watch.look("step", version)
    in_place(student)
    for count in (1, 2):
        older = script["teacher"]
        script["pool"].append(older)
        script["teacher"] = copy.deepcopy(student)
        watch.look("step", LATE + count)
        name = f"script/pool[{count - 1}]"
        assert sorted(found) == sorted(
            {*(f"script/pool[{n}]" for n in range(count)), "script/teacher"}
        )
        assert carried(found, name).data_ptr() == older.weight.data_ptr()
        in_place(student)


def test_what_is_carried_outlives_the_scripts_variables() -> None:
    """A newcomer may copy it from ranks that have come to their scripts' end."""
    script = {"teacher": nn.Linear(4, 2)}
    watch, found = in_space(script)
    watch.look("step", 0)
    in_place(script["teacher"])
    watch.look("step", 1)
    weight = script.pop("teacher").weight.detach().clone()
    watch.look_at_models(ended=True)
    assert torch.equal(carried(found, "script/teacher"), weight)
    watch.look_at_models()
    assert torch.equal(carried(found, "script/teacher"), weight), "a newcomer is yet to come here"
    watch.look_at_models()
    assert found == {}


@pytest.mark.parametrize("bound", ["when it looks first", "later"])
def test_a_loop_variable_gives_no_second_name(bound: str) -> None:
    """`for ema in emas`: the shorter path leads to the last of them."""
    script: dict[str, Any] = {"emas": [nn.Linear(4, 2), nn.Linear(4, 2)]}
    watch, found = in_space(script)
    watch.look("step", 0)
    for ema in script["emas"]:
        script["ema"] = ema
        in_place(ema)
    watch.look("step", 1)
    watch.look("step", 2)
    names = ["script/emas[0]", "script/emas[1]"]
    assert sorted(found) == names
    there: dict[str, Any] = {"emas": [nn.Linear(4, 2), nn.Linear(4, 2)]}
    newcomer, expected = in_space(there)
    if bound == "when it looks first":
        there["ema"] = there["emas"][1]
    newcomer.before_warm_up()
    there["ema"] = there["emas"][0]
    newcomer.expect(set(names))
    assert sorted(expected) == names
    for name in names:
        assert carried(expected, name).data_ptr() == there["emas"][int(name[-2])].weight.data_ptr()


def test_wrapped_tensors_are_looked_at_and_not_carried() -> None:
    model: Any = nn.Linear(4, 2)
    inner = torch.ones(2, 4)
    model.weight = nn.Parameter(TwoTensor(inner, inner.clone()), requires_grad=False)
    watch, found = watching(model)
    model.bias.data.add_(1)
    other, _ = watching(model)
    watch.look("step", LATE)
    assert list(found["script/ema"][0]()) == ["bias"]
    inner.mul_(2)
    other.calls["step"] = 1, 0
    with pytest.raises(UsageError, match="ema has parameters of a class of its own"):
        other.look("step", 1)


@pytest.mark.parametrize("changes", [False, True])
def test_gathered_parameters_of_a_frozen_model_are_no_change(changes: bool) -> None:
    """FSDP2 leaves those of the root gathered behind a forward without a backward."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).requires_grad_(False)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        watch, found = keeping(teacher=model)
        for version in range(LATE):
            watch.look("step", version)
            model(torch.ones(2, 4))
        assert found == {}
        watch.calls["step"] = 1, 0
        if changes:
            model.reshard()
            model[1].weight.to_local().mul_(2)
        watch.look("step", 1)
        assert list(found) == (["script/teacher"] if changes else [])
        if changes:
            model(torch.ones(2, 4))
            assert all(isinstance(x, DTensor) for x in found["script/teacher"][0]().values())
    finally:
        dist.destroy_process_group()


def test_a_path_through_a_list_goes_before_the_variable_of_a_loop() -> None:
    """A newcomer looks for the first time in a later round."""
    script: dict[str, Any] = {"teachers": [nn.Linear(4, 2), nn.Linear(4, 2)]}
    script["teacher"] = script["teachers"][0]
    watch, found = in_space({"main()": script})
    watch.look("step", 0)
    in_place(script["teacher"])
    watch.look("step", 1)
    assert list(found) == ["script/main().teachers[0]"]
    there: dict[str, Any] = {"teachers": [nn.Linear(4, 2), nn.Linear(4, 2)]}
    there["teacher"] = there["teachers"][1]
    newcomer, expected = in_space({"main()": there})
    newcomer.before_warm_up()
    newcomer.expect(set(found))
    first: Any = there["teachers"][0]
    assert carried(expected, "script/main().teachers[0]").data_ptr() == first.weight.data_ptr()


def test_a_name_that_was_given_is_not_taken_away() -> None:
    teacher = nn.Linear(4, 2)
    newcomer, expected = in_space({"teachers": [teacher], "teacher": teacher})
    newcomer.expect({"script/teacher"})
    newcomer.expect({"script/teacher", "script/teachers[0]"})
    assert list(expected) == ["script/teacher"], "the other one is refused by name"
    expected["script/teacher"][1]({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)})
    assert teacher.weight.eq(0).all()


def test_what_is_left_out_is_not_registered_again() -> None:
    script: dict[str, Any] = {"student": nn.Linear(4, 2)}
    watch, found = in_space(script)
    watch.look("step", 0)
    for version in (1, 2):
        script["best"] = copy.deepcopy(script["student"])
        watch.look("step", version)
        assert list(found) == (["script/best"] if version == 1 else [])
        if version == 1:
            found.clear()
            watch.leave_out("script/best")
