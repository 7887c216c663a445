"""A script for test_endings: `endings.py OUT MODE`.

MODE attached: one SGD step after another, each noted in OUT/rank-N, up to the one that OUT/enough
names. MODE bare: no keepstep.attach and no steps, until OUT/go is there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import keepstep

out, mode = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model: torch.nn.Module = torch.nn.Linear(4, 2)
if dist.get_world_size() > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

if mode == "bare":
    with (out / f"starts-{rank}").open("a") as file:
        file.write("start\n")
    while not (out / "go").exists():
        time.sleep(0.05)
    print("done", flush=True)
    sys.exit()

ks = keepstep.attach(model, optimizer)


@ks.step
def train_step(batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)


batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(n)) for n in range(2000)]
for batch in ks.batches(batches):
    train_step(batch)
    (out / f"rank-{rank}").write_text(str(ks.committed_step))
    enough = out / "enough"
    if enough.exists() and ks.committed_step >= int(enough.read_text()):
        break
print("done", flush=True)
