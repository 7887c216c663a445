"""A training script that uses all of the worker API, for test_worker_api.

In order: two loaders in step (zip) with a break, one loop after another and a loop without a
step, a break out of the epochs, and a while loop on ks.committed_step. `--gate`: wait for
this file between the loops and the while loop. `--bare`: the same training without Keepstep.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--gate", type=Path)
parser.add_argument("--bare", action="store_true")
args = parser.parse_args()

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(7)
net: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 6))
torch.manual_seed(100 + rank)
if world > 1:
    net = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)


def loader(rows: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.arange(rows), torch.randn(rows, 6, generator=generator))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, seed=seed)
    return DataLoader(data, batch_size=2, sampler=sampler)


first, second, third = loader(10 * world, 1), loader(8 * world, 2), loader(6 * world, 3)


class Bare:
    """What is left of the script where there is no Keepstep: `step` counts, the rest is plain."""

    protected = False
    committed_step = 0

    def step(self, function: Any) -> Any:
        def counted(*given: Any) -> Any:
            result = function(*given)
            self.committed_step += 1
            return result

        return counted

    def section(self, function: Any) -> Any:
        return function

    def epochs(self, count: int) -> Iterable[int]:
        return range(count)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        return iter(loader)

    def register(self, *given: Any, **more: Any) -> None:
        pass


ks: Any
if args.bare:
    assert "keepstep" not in sys.modules
    ks, newcomer = Bare(), False
else:
    import keepstep

    newcomer = keepstep.is_newcomer()
    ks = keepstep.attach(net, optimizer, scheduler=scheduler)

history = hashlib.sha256().hexdigest()  # of this rank's losses and sample ids, as a chain
updates = [0]  # the same on all ranks


def load_history(value: str) -> None:
    global history
    history = value


def load_updates(value: list[int]) -> None:
    updates[:] = value


ks.register("history", lambda: history, load_history, per_rank=True)
ks.register("updates", lambda: list(updates), load_updates)


@ks.step
def train(where: str, ids: torch.Tensor, x: torch.Tensor) -> float:
    global history
    optimizer.zero_grad()
    loss = (net(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    note = f"{history} {where} {ids.tolist()} {loss.item().hex()} {updates}"
    history = hashlib.sha256(note.encode()).hexdigest()
    optimizer.step()
    scheduler.step()
    updates[0] += 1
    return loss.item()


@ks.section
def average() -> float:
    with torch.no_grad():
        total = sum(p.sum() for p in net.parameters())
    if world > 1:
        dist.all_reduce(total)
    return float(total)


print(f"PROTECTED {ks.protected}", flush=True)
for epoch in ks.epochs(5):
    for loaded in (first, second, third):
        loaded.sampler.set_epoch(epoch)
    for a, b in zip(ks.batches(first), ks.batches(second), strict=False):
        train("zip", torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]]))
        if ks.committed_step % 7 == 3:
            break
    for ids, x in ks.batches(third):
        train("third", ids, x)
    seen = sum(len(ids) for ids, _ in ks.batches(second))  # a loop without a step
    assert seen == len(second) * 2
    average()
    if ks.committed_step >= 12:
        break
print(f"LOOPS step {ks.committed_step}", flush=True)
while args.gate is not None and not args.gate.exists():
    time.sleep(0.02)
while ks.committed_step < 20:
    x = torch.full((2, 6), float(ks.committed_step + rank)).sin()
    train("while", torch.tensor([ks.committed_step]), x)
checked = average()

digest = hashlib.sha256(f"{history} {updates} {checked.hex()} {ks.committed_step}".encode())
for tensor in net.state_dict().values():
    digest.update(tensor.numpy().tobytes())
for entry in optimizer.state_dict()["state"].values():
    for name in sorted(entry):
        digest.update(entry[name].numpy().tobytes())
digest.update(repr(scheduler.state_dict()["_last_lr"]).encode())
digest.update(torch.get_rng_state().numpy().tobytes())
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
said = {
    "rank": rank,
    "sha256": digest.hexdigest(),
    "step": ks.committed_step,
    "newcomer": newcomer,
    "env": {name: os.environ.get(name) for name in names},
    "argv": sys.argv[1:],
    "name": __name__,
}
sys.stdout.flush()
os.write(1, f"END {json.dumps(said)}\n".encode())  # one write: ranks share the pipe
if world > 1:
    dist.barrier()
