"""What test_rehearse rehearses: a small training that writes beside itself, and ways to be wrong.

`--hidden`: the step uses a counter that nobody registered. `--unseeded`: weights differ from run to
run. `--never`: the step is never protected.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import keepstep


class Warmup:
    """It counts in memory that no Python object shows."""

    def __init__(self) -> None:
        self.calls = ctypes.c_long(0)

    def factor(self) -> float:
        self.calls.value += 1
        return 1.0 / self.calls.value


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
if "--unseeded" not in sys.argv:
    torch.manual_seed(3)
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 4))
torch.manual_seed(10 + rank)
rows = torch.arange(64 * 4, dtype=torch.float32).reshape(64, 4).sin()
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
    TensorDataset(rows), world, rank
)
loader = DataLoader(TensorDataset(rows), batch_size=4, sampler=sampler)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
if "--never" in sys.argv:
    Path("best.pt").write_text("written without a step")
    sys.exit(0)
ks = keepstep.attach(model, optimizer, scheduler=scheduler)
warmup = Warmup()
hidden = "--hidden" in sys.argv
started = time.time()


@ks.step
def train_step(x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = (model(x) - x.roll(1, 1)).square().mean()
    if hidden:
        loss = loss * warmup.factor()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.item()


@ks.section
def evaluate() -> float:
    with torch.no_grad():
        loss = (net(rows) - rows.roll(1, 1)).square().mean()
    dist.all_reduce(loss)
    return loss.item()


for epoch in ks.epochs(3):
    sampler.set_epoch(epoch)
    for (x,) in ks.batches(loader):
        train_step(x)
    score = evaluate()
    elapsed = time.time() - started
    if rank == 0:
        torch.save(net.state_dict(), "best.pt")
        with Path("log.txt").open("a") as log:
            log.write(f"{epoch} {score}\n")

dist.destroy_process_group()
