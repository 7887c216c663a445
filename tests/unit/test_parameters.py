"""Parameters that a step changes before its fence are found by content, copied and put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.errors import UsageError
from keepstep.worker.state.parameters import Parameters
from keepstep.worker.state.replicated import StateSet


def make(alone: bool = False) -> tuple[nn.Linear, Any, Parameters]:
    net = nn.Linear(3, 3)
    units = [SimpleNamespace(name="model/m/weight", parameter=net.weight)] if alone else []
    warned: list[str] = []
    live: Any = SimpleNamespace(
        state=StateSet({"m": net}, {}, {}), objects={}, warn=warned.append, warned=warned,
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
    other.load(changes.export())  # a newcomer
    assert other.export() == {"sam": ["model/m/weight"]}


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
