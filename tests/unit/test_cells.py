"""Buffers and extra state: who changes them when decides how they travel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keepstep.worker.state.cells import Cells


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("bank", torch.zeros(3))
        self.register_buffer("table", torch.arange(100_000.0))  # large, never changes
        self.seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def step(net: Net, cells: Cells, number: float) -> None:
    cells.enter()
    net.norm(torch.randn(4, 3))
    net.seen += 1
    net.table.copy_(net.table)  # as DDP writes buffers at every forward, with what they have
    cells.fence()
    net.average.mul_(0.9).add_(number)
    cells.exit()
    net.bank.data.fill_(number)


def names(*keys: str) -> set[str]:
    return {f"model/m/{key}" for key in keys}


STATISTICS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


def test_cells_are_told_apart_by_when_they_change() -> None:
    net = Net()
    cells = Cells({"m": net})
    step(net, cells, 1.0)
    assert cells.late == names("average") and cells.own() == names(*STATISTICS, "extra_state")
    step(net, cells, 2.0)
    assert cells.own() == names(*STATISTICS, "extra_state", "bank")
    assert set(cells.side()) == cells.own()


def test_a_retry_finds_every_cell_as_it_was_at_the_entry() -> None:
    net = Net()
    cells = Cells({"m": net})
    step(net, cells, 1.0)
    before = {key: value.clone() for key, value in net.named_buffers()}
    cells.enter()
    net.norm(torch.randn(4, 3))
    net.seen += 5
    net.average.data.add_(1.0)
    net.table = torch.zeros(100_000)  # replaced, and for the first time
    cells.undo()
    assert net.seen == 1
    assert all(torch.equal(value, before[key]) for key, value in net.named_buffers())


def test_a_newcomer_gets_its_own_cells_from_its_rank_and_late_ones_from_a_replica() -> None:
    net, twin = Net(), Net()
    cells, theirs = Cells({"m": net}), Cells({"m": twin})
    for number in (1.0, 2.0):
        step(net, cells, number)
    theirs.import_late(cells.export_late())
    theirs.put(cells.side())
    assert twin.seen == 2 and torch.equal(twin.norm.running_mean, net.norm.running_mean)
    assert not twin.average.any() and torch.equal(twin.bank, net.bank)
    assert "model/m/average" not in theirs.own()
