"""Scripts that hold batches back, and newcomers that get another batch than their rank had."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keepstep.worker.script.batches import Loop
from keepstep.worker.script.position import Tracker
from keepstep.worker.script.tree import MISSING

BATCHES = [torch.tensor([n]) for n in range(6)]


class Script:
    """A prefetcher of `depth` batches over two epochs; the position of every step is kept."""

    def __init__(self, depth: int, position: Any = None, batches: Any = BATCHES) -> None:
        self.depth = depth
        self.batches = batches
        self.tracker = Tracker()
        self.trained: list[int] = []
        self.positions: list[Any] = []
        self.loops: list[Loop] = []
        if position is not None:
            self.tracker.walk_to(position)

    def run(self) -> Script:
        level, epoch = self.tracker.open_epochs()
        while epoch < 2:
            self.tracker.next_epoch(level, epoch)
            self.epoch()
            epoch = level.epoch + 1
        return self

    def epoch(self) -> None:
        loop = Loop(self.tracker, self.batches)
        self.loops.append(loop)
        held: list[Any] = []
        while True:
            while len(held) <= self.depth:
                try:
                    held.append(loop.next())
                except StopIteration:
                    break
            if not held:
                return
            self.step(int(held.pop(0)))

    def step(self, number: int) -> None:
        if self.tracker.begin("train", True) is not MISSING:
            return
        self.tracker.in_txn = True
        self.positions.append(self.tracker.position("train", True))
        self.tracker.in_txn = False
        self.tracker.commit("train", True, None)
        self.trained.append(number)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_newcomer_trains_on_the_rest(depth: int) -> None:
    undisturbed = Script(depth).run()
    assert undisturbed.trained == [*range(6), *range(6)]
    for number, position in enumerate(undisturbed.positions):
        newcomer = Script(depth, position).run()
        assert newcomer.trained == undisturbed.trained[number + 1 :], f"step {number}"
        assert not any(loop.other for loop in newcomer.loops)


def test_another_batch_is_named() -> None:
    position = Script(0).run().positions[3]
    others = [*BATCHES[:3], torch.tensor([30]), *BATCHES[4:]]
    newcomer = Script(0, position, others).run()
    assert [bool(loop.other) for loop in newcomer.loops] == [True, False]
