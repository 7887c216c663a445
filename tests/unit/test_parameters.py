"""What a step or section changes before its fence is found, copied and put back, or named."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.errors import UsageError
from keepstep.worker.state.cells import Cells
from keepstep.worker.state.objects import Registered, Undo, snapshots
from keepstep.worker.state.parameters import Parameters
from keepstep.worker.state.replicated import StateSet


def make(alone: bool = False) -> tuple[nn.Linear, Any, Parameters]:
    net = nn.Linear(3, 3)
    units = [SimpleNamespace(name="model/m/weight", parameter=net.weight)] if alone else []
    warned: list[str] = []
    live: Any = SimpleNamespace(
        state=StateSet({"m": net}, {}, {}), objects={}, warn=warned.append, warned=warned,
        cells=Cells({"m": net}),
    )  # fmt: skip
    return net, live, Parameters(live, SimpleNamespace(needed=alone, units=units))


def perturb(net: nn.Linear) -> None:
    net.weight.data.add_(0.25)  # the version counter does not move


def test_a_perturbation_is_found_told_once_and_undone_from_then_on() -> None:
    net, live, changes = make()
    changes.enter("sam")
    perturb(net)
    changes.fence("sam", True)
    assert len(live.warned) == 1 and "model/m/weight" in live.warned[0]
    before = net.weight.detach().clone()
    changes.enter("sam")
    perturb(net)
    changes.undo()
    assert torch.equal(net.weight, before) and not changes.left_changed()
    perturb(net)
    changes.fence("sam", True)
    assert len(live.warned) == 1


def test_what_could_not_be_put_back_is_named() -> None:
    net, _, changes = make()
    changes.enter("fgm")
    perturb(net)
    changes.undo()
    assert changes.left_changed() == "model/m/weight"


@pytest.mark.parametrize("where", ["behind the update", "between steps", "without an optimizer"])
def test_what_no_replica_has_may_be_changed_by_optimizers_alone(where: str) -> None:
    net, _, changes = make(alone=True)
    changes.enter("step")
    with pytest.raises(UsageError, match=f"model/m/weight.*{where}"):
        if where == "without an optimizer":
            perturb(net)
            changes.fence("step", False)
        changes.fence("step", True)
        changes.updated()
        if where == "behind the update":
            perturb(net)
        changes.exit("step")
        perturb(net)
        changes.enter("step")


def test_what_is_put_back_before_the_update_is_found_at_a_backward() -> None:
    net, live, changes = make()
    changes.enter("sam")
    before = net.weight.detach().clone()
    perturb(net)
    changes.midway("sam")
    net.weight.data.copy_(before)
    changes.fence("sam", True)
    assert len(live.warned) == 1
    other = make()[2]
    other.noted(changes.noted())  # a newcomer
    assert other.noted() == {"sam": ["model/m/weight"]}


@pytest.mark.parametrize("where", ["between", "fence", "confirm"])
def test_a_rare_change_of_what_no_replica_has_is_found(where: str) -> None:
    net, _, changes = make(alone=True)
    for _ in range(10):  # no longer looked at in full
        changes.between()
        changes.enter("step")
        changes.fence("step", True)
        net.weight.data.mul_(0.9)
        changes.updated()
        changes.exit("step")
    changes.between()
    changes.confirm()
    perturb(net)
    with pytest.raises(UsageError, match=r"model/m/weight.*outside the update"):
        changes.fence("step", True) if where == "fence" else getattr(changes, where)()
    changes.forget()
    changes.between()


@pytest.mark.parametrize("how", ["data", "in place", "other memory"])
def test_a_change_that_begins_late_is_found_before_a_retry(how: str) -> None:
    net, _, changes = make()
    for _ in range(10):  # no longer looked at in full
        changes.enter("step")
        net.weight.data.mul_(0.9)
    changes.enter("step")
    assert changes.left_changed() == ""
    if how == "data":
        perturb(net)
    elif how == "in place":
        with torch.no_grad():
            net.weight[0, 0].add_(0.0)
    else:
        net.weight.data = net.weight.data.clone()
    assert changes.left_changed() == "model/m/weight"
    changes.enter("step")
    assert changes.left_changed() == ""


def test_an_update_that_a_device_has_left_out_is_no_change() -> None:
    net, _, changes = make()
    for _ in range(10):
        changes.enter("step")
    changes.queued()
    with torch.no_grad():
        net.weight.add_(0.0)  # the version counter moves, the content does not
    assert changes.left_changed() == ""
    perturb(net)
    assert changes.left_changed() == "model/m/weight"


def test_what_is_written_with_the_same_content_is_copied_from_then_on() -> None:
    net, live, changes = make()
    for number in range(10):
        changes.enter("step")
        with torch.no_grad():
            net.weight.clamp_(-100.0, 100.0)  # nothing is beyond
        changes.fence("step", True)
        changes.undo()
        assert changes.left_changed() == "", number
    assert len(live.warned) == 1


# ------------------------------------------------------------------------------------ sections


def swap(net: nn.Linear, how: str) -> Callable[[], None]:
    """Other weights, as for an evaluation. What it returns puts the own ones back."""
    backup = {name: x.clone() for name, x in net.state_dict().items()}
    with torch.no_grad():
        if how == "load":
            net.load_state_dict({name: x * 0.5 for name, x in backup.items()})
            return lambda: net.load_state_dict(backup) and None
        if how == "in data":
            for p in net.parameters():
                p.data.mul_(0.5)
        else:
            for p in net.parameters():
                p.data = p.data * 0.5

    def back() -> None:
        for name, p in net.named_parameters():
            if how == "in data":
                p.data.copy_(backup[name])
            else:
                p.data = backup[name]

    return back


@pytest.mark.parametrize("how", ["load", "in data", "other memory"])
@pytest.mark.parametrize("begins", [1, 2, 4, 7])
def test_a_section_that_swaps_weights_is_undone(begins: int, how: str) -> None:
    net, live, changes = make()
    for call in range(1, 12):
        changes.enter("step")
        changes.fence("step", True)
        net.weight.data.mul_(0.9)
        changes.enter("evaluate", False)
        before = net.weight.detach().clone()
        back = swap(net, how) if call >= begins else lambda: None
        changes.collective("evaluate")
        if call == 11:
            break
        back()
        changes.before_fence("evaluate")
    assert len(live.warned) == 1 and "section 'evaluate' changes 2 tensors (first" in live.warned[0]
    changes.undo()
    assert torch.equal(net.weight, before)
    # Parameters that lie elsewhere than at the entry: their copies are put there.
    assert changes.left_changed() == ""


@pytest.mark.parametrize("how", ["load", "in data", "other memory"])
@pytest.mark.parametrize("call", [1, 3, 5, 8, 11])
def test_a_section_that_swaps_weights_for_the_first_time_is_named(call: int, how: str) -> None:
    net, _, changes = make()
    for _ in range(call):
        changes.enter("evaluate", False)
        changes.before_fence("evaluate")
    changes.enter("evaluate", False)
    swap(net, how)
    changes.undo()
    assert changes.left_changed() == "model/m/bias"


def test_a_section_may_put_back_weights_that_no_replica_has() -> None:
    net, _, changes = make(alone=True)
    for _ in range(5):
        changes.between()
        changes.enter("step")
        changes.fence("step", True)
        net.weight.data.mul_(0.9)
        changes.updated()
        changes.exit("step")
        changes.between()
        changes.enter("evaluate", False)
        swap(net, "load")()
        changes.before_fence("evaluate")
    swap(net, "load")
    with pytest.raises(UsageError, match=r"model/m/weight.*outside the update"):
        changes.between()


# ------------------------------------------------------------------------------- large objects


class Teacher:
    """A large object beside the model. Its tensors lie elsewhere whenever it moves."""

    def __init__(self, copies: bool = False) -> None:
        self.tensors = {"bank": torch.rand(200, 200), "count": torch.zeros(3)}
        self.copies = copies

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {k: x.clone() if self.copies else x.detach() for k, x in self.tensors.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, x in state.items():
            self.tensors[name].copy_(x)

    def count(self) -> None:
        self.tensors["count"].add_(1.0)

    def move(self) -> None:
        self.tensors["count"] = self.tensors["count"] + 1.0


def teach(copies: bool = False) -> tuple[Teacher, Registered, Any, Parameters]:
    _, live, changes = make()
    teacher = Teacher(copies)
    item = Registered("teacher", teacher.state_dict, teacher.load_state_dict)
    assert item.large
    live.objects["teacher"] = item
    return teacher, item, live, changes


@pytest.mark.parametrize("begins", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("how", ["count", "move"])
def test_a_large_object_that_begins_to_change_late_is_undone_or_named(
    begins: int, how: str
) -> None:
    for killed in range(begins, begins + 8):
        teacher, item, live, changes = teach()
        for call in range(1, killed + 1):
            copied = "teacher" in changes.objects_changed("step")
            undo = Undo(b"", [], [(item, item.snapshot(changes=copied))], None)
            changes.enter("step")
            before = teacher.tensors["count"].clone()
            if call >= begins:
                getattr(teacher, how)()
            if call < killed:
                changes.fence("step", True)
        undo.undo()
        changes.undo()
        left = changes.left_changed()
        same = torch.equal(teacher.tensors["count"], before)
        assert left == "" if same else left == "object teacher"
        assert same == (killed > begins)
        assert len(live.warned) == same
        assert not same or "(first: object teacher): 0.2 MiB" in live.warned[0]


@pytest.mark.parametrize("how", ["count", "move", "swap", "copies", "grow"])
@pytest.mark.parametrize("begins", [1, 6])
def test_what_changes_behind_the_fence_is_no_reason_to_refuse(begins: int, how: str) -> None:
    teacher, _, live, changes = teach(copies=how == "copies")
    other: dict[str, torch.Tensor] = {}
    for call in range(1, 40):
        changes.enter("step")
        changes.fence("step", True)
        assert changes.left_changed() == "", call
        if call >= begins:
            if how == "grow":
                teacher.tensors[f"row {call}"] = torch.rand(3)
            elif how == "swap":
                teacher.tensors, other = {n: x + 1.0 for n, x in teacher.tensors.items()}, {}
                other.update(teacher.tensors)
            else:
                getattr(teacher, "move" if how == "move" else "count")()
    assert not live.warned and not changes.objects_changed("step")


def test_a_large_object_is_saved_only_now_and_then() -> None:
    teacher, item, _, changes = teach()
    saved: list[int] = []
    item.save = lambda: saved.append(call) or teacher.state_dict()
    for call in range(1, 130):
        changes.enter("step")
        changes.fence("step", True)
        teacher.count()
        if call == 100:
            teacher.tensors["count"] = teacher.tensors["count"].clone()
    assert sorted({*saved}) == [1, 2, 3, 4, 8, 16, 32, 64, 101, 128]


def test_what_a_step_uses_of_a_large_object_for_a_while_is_no_reason_to_save_it() -> None:
    teacher, item, _, changes = teach()
    calls: list[int] = []
    saved: set[int] = set()
    item.save = lambda: saved.add(len(calls)) or teacher.state_dict()
    for _ in range(1, 30):
        calls.append(0)
        changes.enter("step")
        graph = [teacher.tensors["bank"].view(-1) for _ in range(3)]
        changes.fence("step", True)
        del graph
    assert sorted(saved) == [1, 2, 3, 4, 8, 16]


def test_a_large_object_is_copied_only_where_it_changes_before_the_fence() -> None:
    teacher, item, live, changes = teach()
    for call in range(1, 12):
        for site in ("step", "section"):
            copied = changes.objects_changed(site)
            assert copied == ({"teacher"} if site == "section" and call > 1 else set())
            changes.enter(site, site == "step")
            if site == "section":
                teacher.count()
                changes.before_fence(site)
            else:
                changes.fence(site, True)
    assert len(live.warned) == 1 and item.snapshot() is None


def test_buffers_of_attached_models_in_an_object_are_left_to_their_model() -> None:
    net = nn.Sequential(nn.Linear(3, 200), nn.BatchNorm1d(200))
    _, live, changes = make()
    live.cells = Cells({"m": net})
    live.objects["net"] = Registered("net", net.state_dict, net.load_state_dict)
    live.objects["net"].large = True
    for _ in range(10):
        changes.enter("step")
        changes.fence("step", True)
    changes.enter("step")
    net[1].running_mean.add_(1.0)
    assert changes.left_changed() == ""
    net[1].weight.data.add_(1.0)
    assert changes.left_changed() == "object net"


def test_an_object_that_has_outgrown_its_copies_is_told_once() -> None:
    pairs: list[tuple[int, float]] = []
    item = Registered("losses", lambda: list(pairs), pairs.extend)
    warned: list[str] = []
    for count in (100, 300_000, 400_000):
        pairs.extend((n, float(n)) for n in range(count - len(pairs)))
        assert snapshots([item], warned.append)[0][1] is not None
        assert len(warned) == (count > 100)
    assert "registered object 'losses' has grown to" in warned[0] and " ms (hint: " in warned[0]
    assert item.outgrown(1 << 30, 1.0) == ""
    small = Registered("small", lambda: 1, lambda _: None)
    assert small.outgrown(100, 1.0) == "" != small.outgrown(100_000, 0.006)
