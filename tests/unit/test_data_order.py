"""Which batches come next must be known to any process that takes the rank over."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from keepstep.errors import UsageError
from keepstep.worker.script.batches import Loop
from keepstep.worker.script.position import Tracker

DATA = list(range(12))


class Shuffled(Sampler[int]):
    """Shuffles with a generator of the process, as many scripts do."""

    def __init__(self, which: str) -> None:
        self.which = which

    def __iter__(self) -> Iterator[int]:
        order = list(DATA)
        if self.which == "random":
            random.shuffle(order)
        else:
            numpy.random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return len(DATA)


def loaders(kind: str) -> Iterable[Any]:
    if kind == "torch":
        return DataLoader(DATA, sampler=RandomSampler(DATA))
    if kind == "generator":
        return (DATA[i] for i in iter(Shuffled("random")))
    return DataLoader(DATA, sampler=Shuffled(kind))


def seed(value: int) -> None:
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)


def values(loop: Loop, count: int) -> list[int]:
    found = []
    for _ in range(count):
        found.append(int(loop.next()))
        random.random(), numpy.random.rand(), torch.rand(())  # training draws too
    return found


@pytest.mark.parametrize("kind", ["torch", "random", "numpy"])
def test_another_process_repeats_the_order_of_a_shuffle(kind: str) -> None:
    seed(1)
    random.random()
    whole = values(Loop(Tracker(), loaders(kind)), 12)
    seed(1)
    random.random()
    tracker = Tracker()
    loop = Loop(tracker, loaders(kind))
    begun = values(loop, 4)
    tracker.in_txn = True
    position = tracker.position("train", True)

    seed(99)
    newcomer = Tracker()
    newcomer.walk_to(position)
    continued = values(Loop(newcomer, loaders(kind)), 9)  # the fourth is handed out again
    assert begun + continued[1:] == whole


def test_an_order_that_depends_on_the_speed_of_workers_is_refused() -> None:
    with pytest.raises(UsageError, match="in_order=False") as caught:
        Loop(Tracker(), DataLoader(DATA, num_workers=2, in_order=False))
    assert caught.value.hint == "leave in_order at True"
    Loop(Tracker(), DataLoader(DATA, num_workers=1, in_order=False))  # one worker: one order


def test_draws_between_batches_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    def picks() -> Iterator[int]:
        while True:
            yield random.choice(DATA)

    loop = Loop(Tracker(), picks())
    values(loop, 3)
    text = capfd.readouterr().err
    assert text.count("draws from the process's random generators") == 1
    assert "hint:" in text


def test_a_shuffle_before_the_first_batch_is_not_named(capfd: pytest.CaptureFixture[str]) -> None:
    values(Loop(Tracker(), loaders("generator")), 3)
    values(Loop(Tracker(), loaders("random")), 3)
    assert capfd.readouterr().err == ""
