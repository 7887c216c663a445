"""What a newcomer of a rank that has ended a transaction begins with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from keepstep.worker.state.objects import Registered
from keepstep.worker.step.boundary import Boundary


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Rank:
    def __init__(self) -> None:
        self.counter, self.own = Counter(), Counter()
        self.optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        self.objects = {
            "counter": Registered("counter", self.counter.state_dict, self.counter.load_state_dict),
            "own": Registered("own", self.own.state_dict, self.own.load_state_dict, per_rank=True),
        }
        self.tick = 0
        facts: Any = SimpleNamespace(
            objects=self.objects, optimizers={"o": self.optimizer}, tick=self.tick
        )
        self.facts = facts
        self.boundary = Boundary(facts, lambda: {"counter", "own"}, "of an optimizer")

    def change(self) -> None:
        self.counter.count += 1
        self.own.count += 1
        self.optimizer.param_groups[0]["lr"] /= 2

    def seen(self) -> tuple[int, int, float]:
        return self.counter.count, self.own.count, self.optimizer.param_groups[0]["lr"]

    def transaction(self) -> None:
        """A change before the fence, one by each of two updates, and one behind them."""
        self.change()
        self.boundary.fenced()
        for _ in range(2):
            self.optimizer.param_groups[0]["lr"] /= 2
            self.boundary.updated("o")
        self.change()
        self.boundary.passed()
        self.facts.tick += 1


def test_a_newcomer_has_what_the_last_transaction_had_and_left() -> None:
    rank, newcomer = Rank(), Rank()
    rank.transaction()
    rank.change()
    told = rank.boundary.export()
    newcomer.facts.tick = 1
    newcomer.boundary.load(told)
    for _ in range(3):
        newcomer.change()
    newcomer.boundary.put_fence()
    assert newcomer.seen() == (1, 3, 1 / 2), "what is its own is not touched"
    for lr in (1 / 4, 1 / 8, 1 / 8):
        newcomer.boundary.put_updated("o")
        assert newcomer.seen() == (1, 3, lr)
    newcomer.boundary.put_left()
    assert newcomer.seen() == (2, 3, 1 / 16)
    assert newcomer.boundary.export() == told, "it may have to serve it"


def test_only_what_is_not_remembered_is_named() -> None:
    rank = Rank()
    rank.transaction()
    names = ["model/0/weight", "object/counter/0", "object/large/0", "object counter"]
    assert rank.boundary.not_remembered(names) == ["model/0/weight", "object/large/0"]


def test_another_transaction_than_the_last_one_is_not_told() -> None:
    rank, newcomer = Rank(), Rank()
    rank.transaction()
    newcomer.boundary.load(rank.boundary.export())
    newcomer.change()
    newcomer.boundary.put_left()
    assert newcomer.seen() == (1, 1, 0.5), "it is of another transaction"
    newcomer.facts.tick = 1
    newcomer.boundary.put_left()
    assert newcomer.seen() == (2, 1, 1 / 16)
    rank.facts.tick = 5
    assert rank.boundary.export() == {}


def test_learning_rates_in_tensors_are_left_alone() -> None:
    rank, newcomer = Rank(), Rank()
    rank.optimizer.param_groups[0]["lr"] = torch.tensor(1.0)
    rank.transaction()
    newcomer.facts.tick = 1
    newcomer.boundary.load(rank.boundary.export())
    newcomer.change()
    newcomer.boundary.put_left()
    assert newcomer.seen() == (2, 1, 0.5)
