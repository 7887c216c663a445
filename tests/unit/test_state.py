from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from keepstep.errors import UsageError
from keepstep.worker.state import export, tensors
from keepstep.worker.state.export import Exported
from keepstep.worker.state.objects import Registered
from keepstep.worker.state.replicated import FLAGS, StateSet
from keepstep.worker.state.tensors import memory, on_cpu


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.tied = nn.Linear(4, width, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.small = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("gone", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.first(x) + self.tied(x)).sum() + self.small.float().sum()
        z: torch.Tensor = self.conv(torch.ones(1, 3, 3, 3))
        return y + z.square().sum()


class Rank:
    def __init__(self, seed: int, steps: int, width: int = 6, lr: float = 0.01) -> None:
        torch.manual_seed(seed)
        self.net = Net(width)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.ema = {"shadow": torch.full((3,), float(seed)), "count": seed}
        for _ in range(steps):
            self.step()
        self.set = StateSet(
            {"net": self.net},
            {"main": self.optimizer},
            {
                "schedule": Registered(
                    "schedule", self.schedule.state_dict, self.schedule.load_state_dict
                ),
                "ema": Registered("ema", lambda: self.ema, self._load_ema),
            },
        )

    def _load_ema(self, loaded: Any) -> None:
        self.ema = loaded

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.randn(5, 4)).backward()
        self.optimizer.step()
        self.schedule.step()


def copy(exported: Exported, target: StateSet) -> None:
    landing = copy_all(exported, target)
    assert list(landing) == list(exported.tensors)


def copy_all(exported: Exported, target: StateSet) -> dict[str, torch.Tensor]:
    """Of all that the target wants."""
    landing = target.prepare_import(exported.meta)
    for name, tensor in landing.items():
        memory(tensor)[:] = memory(on_cpu(exported.tensors[name]))
    target.finish_import()
    return landing


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_import_makes_an_equal_rank_that_goes_on_equally(steps: int) -> None:
    source, target = Rank(1, steps), Rank(2, 2, lr=0.5)
    copy(source.set.export(), target.set)
    assert target.set.digest() == source.set.digest()
    assert target.ema["count"] == 1 and target.schedule.last_epoch == steps
    for _ in range(3):
        torch.manual_seed(7)
        source.step()
        torch.manual_seed(7)
        target.step()
    assert target.set.digest() == source.set.digest()


def test_existing_tensors_are_filled_in_place() -> None:
    source, target = Rank(1, 3), Rank(2, 2)
    weight, moment = target.net.first.weight, target.optimizer.state[target.net.small]["exp_avg"]
    address = target.net.conv.weight.data_ptr()
    copy(source.set.export(), target.set)
    assert target.net.first.weight is weight is target.net.tied.weight
    assert target.net.conv.weight.data_ptr() == address
    assert target.optimizer.state[target.net.small]["exp_avg"].data_ptr() == moment.data_ptr()
    assert moment.dtype == torch.bfloat16  # load_state_dict would agree here, and cast elsewhere


@pytest.mark.parametrize("behind", [False, True])
def test_objects_that_nobody_knows_stay_as_the_walk_has_made_them(behind: bool) -> None:
    """The source has not seen `ema` change; what the rank did to it, its newcomer does again."""
    source, target = Rank(1, 2), Rank(2, 2)
    walked, schedule = target.ema, source.schedule.state_dict()
    target.set.blind, target.set.own = True, frozenset() if behind else None

    def says(_: Any) -> None:
        target.set.unchanged = {"ema"}

    for rank in (source, target):
        rank.set.objects = {**rank.set.objects, FLAGS: Registered(FLAGS, dict, lambda _: None)}
    target.set.objects[FLAGS].load = says
    copy_all(source.set.export(), target.set)
    assert target.schedule.state_dict() == schedule
    assert (target.ema is walked) == behind, "before the walk it is as all others have it"


def test_an_object_that_is_a_ranks_own_is_not_taken_from_a_source_that_shares_it() -> None:
    source, target = Rank(1, 2), Rank(2, 2)
    own = target.ema
    target.set.objects = {n: o for n, o in target.set.objects.items() if n != "ema"}
    target.set.apart = frozenset({"ema"})
    copy_all(source.set.export(), target.set)
    assert target.ema is own


def test_optimizer_state_that_the_source_lacks_is_removed() -> None:
    source, target = Rank(1, 0), Rank(2, 2)
    target.optimizer.param_groups[0]["left"] = 3
    copy(source.set.export(), target.set)
    assert not target.optimizer.state and "left" not in target.optimizer.param_groups[0]


def test_gradients_become_absent_zero_or_alive_as_in_the_source() -> None:
    source, target = Rank(1, 2), Rank(2, 2)
    source.net.small.grad = None
    source.net.norm.bias.grad = torch.zeros_like(source.net.norm.bias)
    copy(source.set.export(), target.set)
    assert target.net.small.grad is None
    zero, alive = target.net.norm.bias.grad, target.net.first.weight.grad
    assert zero is not None and not zero.any()
    assert alive is not None and torch.equal(alive, source.net.first.weight.grad)


def test_many_gradients_travel_only_where_they_are_known_to_outlive_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export, "GRADIENT_BYTES_MAX", 10)
    source = Rank(1, 2)
    assert not any(name.startswith("grad/") for name in source.set.export().tensors)
    source.set.outliving = lambda: True
    assert "grad/model/net/first.weight" in source.set.export().tensors


def test_what_is_the_ranks_own_stays_at_an_import() -> None:
    source, target = Rank(1, 2), Rank(2, 2)
    mean, gradient = target.net.norm.running_mean.clone(), target.net.first.weight.grad.clone()
    target.set.own = frozenset({"model/net/norm.running_mean"})
    exported = source.set.export()
    landing = target.set.prepare_import(exported.meta)
    assert "model/net/norm.running_mean" not in landing
    for name, tensor in landing.items():
        memory(tensor)[:] = memory(on_cpu(exported.tensors[name]))
    target.set.finish_import()
    assert torch.equal(target.net.norm.running_mean, mean)
    assert torch.equal(target.net.first.weight.grad, gradient)
    assert torch.equal(target.net.norm.running_var, source.net.norm.running_var)


def test_parameter_groups_that_were_added_later_are_added_to_a_newcomer() -> None:
    def make(added: bool) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(net[0].parameters(), lr=0.5, momentum=0.9)
        if added:
            optimizer.add_param_group({"params": list(net[1].parameters()), "lr": 0.25})
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return net, optimizer

    (net, optimizer), (other, twin) = make(True), make(False)
    copy(
        StateSet({"m": net}, {"o": optimizer}, {}).export(), StateSet({"m": other}, {"o": twin}, {})
    )
    assert [group["lr"] for group in twin.param_groups] == [0.5, 0.25]
    assert torch.equal(
        twin.state[other[1].weight]["momentum_buffer"],
        optimizer.state[net[1].weight]["momentum_buffer"],
    )


def test_a_fingerprint_names_what_changed() -> None:
    rank = Rank(1, 2)
    before = rank.set.fingerprint()
    assert rank.set.fingerprint() == before
    rank.net.first.weight.data.mul_(0.5)
    rank.optimizer.param_groups[0]["lr"] = 0.125
    after = rank.set.fingerprint()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"model/net/first.weight", "optimizer main", "meta"}


def test_shared_tensors_and_second_names_of_a_model_travel_once() -> None:
    rank = Rank(1, 1)
    both = StateSet({"a": rank.net, "b": nn.Sequential(rank.net)}, {}, {})
    names = list(both.export().tensors)
    assert not [name for name in names if name.startswith("model/b/")]
    assert "model/a/tied.weight" not in names and "model/a/gone" in names


def test_tensor_hyperparameters_and_nested_state_travel() -> None:
    def make(value: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(value))
        optimizer.state[net.weight] = {"history": [torch.full((2,), value), None], "n": 3}
        return net, optimizer

    (net, optimizer), (other, twin) = make(0.5), make(0.25)
    exported = StateSet({"m": net}, {"o": optimizer}, {}).export()
    assert {"optim/o/group/0", "optim/o/0/#0"} <= set(exported.tensors)
    copy(exported, StateSet({"m": other}, {"o": twin}, {}))
    assert twin.param_groups[0]["lr"].item() == 0.5
    assert twin.state[other.weight]["history"][0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("target", "name"),
    [(lambda: Rank(2, 0, width=7).set, "model/net/first.weight"), (lambda: extra(), "model/net/x")],
)
def test_another_model_is_refused_by_its_first_tensor(target: Any, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        target().prepare_import(Rank(1, 0).set.export().meta)


def extra() -> StateSet:
    rank = Rank(2, 0)
    rank.net.register_buffer("x", torch.zeros(1))
    return rank.set


def test_other_optimizers_and_objects_are_refused() -> None:
    exported = Rank(1, 1).set.export()
    target = Rank(2, 1)
    target.set.optimizers = {}
    with pytest.raises(UsageError, match="no optimizer 'main'"):
        target.set.prepare_import(exported.meta)
    target = Rank(2, 1)
    del target.set.objects["ema"]
    with pytest.raises(UsageError, match="'ema'"):
        copy(exported, target.set)


def test_unserialisable_object_is_named() -> None:
    with pytest.raises(UsageError, match=r"state\['f'\]"):
        Registered("bad", lambda: {"f": object()}, lambda _: None)


def test_dense_knows_permuted_and_holey_memory() -> None:
    assert tensors.dense(torch.ones(2, 3).t()) and tensors.dense(torch.ones(()))
    assert tensors.dense(torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last))
    assert not tensors.dense(torch.ones(4, 4)[:, ::2])
    assert not tensors.dense(torch.ones(1).expand(3))
    assert not tensors.dense(torch.ones(2, dtype=torch.complex64).conj())
