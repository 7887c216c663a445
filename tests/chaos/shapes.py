"""Steps of other shapes than train.py's, one per `--shape`; everything else is kept small.

pull    the step pulls its micro-batches itself; the last one of an epoch sees the loader's end
micro   several micro-batches in one step, and `--die RANK:STEP` between the first two
pop     the batch is a dict that the step takes apart
zip     two loaders side by side, then a loop over a third
view    gradients are views of DDP's buckets, zeroed at the start of a step
static  DDP with static_graph

`--reset RANK:STEP`: this rank's TCP connections are cut, and nobody dies.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--shape", required=True)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--steps-per-epoch", type=int, default=6)
parser.add_argument("--die", default="", help="RANK:STEP, in the first process only")
parser.add_argument("--reset", default="", help="RANK:STEP, once")
parser.add_argument("--slow", default="", help="steps take 0.2 s while this file exists")
args = parser.parse_args()

BATCH, MICRO, WIDTH = 4, 3, 16
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(11)
net = nn.Sequential(
    nn.Linear(WIDTH, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, WIDTH)
)
torch.manual_seed(100 + rank)
random.seed(rank)
ddp = nn.parallel.DistributedDataParallel(
    net,
    bucket_cap_mb=0.002,
    broadcast_buffers=False,
    gradient_as_bucket_view=args.shape == "view",
    static_graph=args.shape == "static",
)
adam = torch.optim.AdamW(net.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.StepLR(adam, 2, 0.9)
history: list[Any] = []

ks = keepstep.attach(ddp, adam, scheduler=scheduler)
ks.register(
    "history", lambda: list(history), lambda s: history.__setitem__(slice(None), s), per_rank=True
)


class Data(Dataset[dict[str, Any]]):
    def __init__(self, batches: int) -> None:
        self.rows = batches * BATCH * world

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"ids": index, "x": x, "y": x.roll(1)}


def loader(batches: int) -> DataLoader[dict[str, Any]]:
    data = Data(batches)
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, world, rank, seed=batches))


def backward(batch: dict[str, Any], sync: bool = True) -> None:
    with torch.enable_grad() if sync else ddp.no_sync():
        loss = nn.functional.mse_loss(ddp(batch["x"] + random.random() * 1e-3), batch["y"])
        loss.backward()
    history.append([ks.committed_step, batch["ids"].tolist(), loss.item()])


def update() -> None:
    if args.slow and Path(args.slow).exists():
        time.sleep(0.2)
    adam.step()
    scheduler.step()


def told(spec: str) -> bool:
    if not spec or keepstep.is_newcomer():
        return False
    who, step = map(int, spec.split(":"))
    return (rank, ks.committed_step) == (who, step)


def die_if_told() -> None:
    if told(args.die):
        os.kill(os.getpid(), signal.SIGKILL)


def cut_if_told() -> None:
    done = Path(args.out) / "reset"  # a retry puts variables back, and files not
    if not told(args.reset) or done.exists():
        return
    done.touch()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # no socket, or one that listens


@ks.step
def several(batches: Iterable[dict[str, Any]]) -> None:
    """All but the last micro-batch without a collective; how many there are is not known before."""
    adam.zero_grad()
    taken = itertools.islice(batches, MICRO)
    batch = next(taken)
    for following in taken:
        backward(batch, sync=False)
        die_if_told()
        batch = following
    backward(batch)
    update()


@ks.step
def one(batch: dict[str, Any]) -> None:
    cut_if_told()
    adam.zero_grad(set_to_none=args.shape != "view")
    backward(batch)
    update()


@ks.step
def apart(batch: dict[str, Any]) -> None:
    adam.zero_grad()
    backward({name: batch.pop(name) for name in ("x", "y", "ids")})
    assert not batch
    update()


@ks.section
def evaluate() -> None:
    with torch.no_grad():
        total = sum(p.sum() for p in net.parameters()) * (rank + 1)
    dist.all_reduce(total)
    history.append(total.item())


def pieces(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value[i : i + 1].repeat_interleave(2, 0) for name, value in batch.items()}
            for i in range(MICRO)]  # fmt: skip


STEPS = args.steps_per_epoch
single, many, other = loader(STEPS), loader(STEPS * MICRO - 1), loader(STEPS + 1)
for epoch in ks.epochs(args.epochs):
    for each in (single, many, other):
        each.sampler.set_epoch(epoch)
    if args.shape == "pull":
        stream = ks.batches(many)
        while ks.committed_step < (epoch + 1) * STEPS:
            several(stream)
    elif args.shape == "zip":
        for left, right in zip(ks.batches(single), ks.batches(other), strict=False):
            several([left, right])
        for batch in ks.batches(other):
            one(batch)
    else:
        for batch in ks.batches(single):
            if args.shape == "micro":
                several(pieces(batch))
            elif args.shape == "pop":
                apart(batch)
            else:
                one(batch)
    evaluate()
dist.barrier()


def flat(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return hashlib.sha256(thing.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(thing, dict):
        return {str(k): flat(v) for k, v in thing.items()}
    return [flat(v) for v in thing] if isinstance(thing, list | tuple) else repr(thing)


state = {
    "model": flat(ddp.state_dict()),
    "optimizer": flat(adam.state_dict()),
    "scheduler": flat(scheduler.state_dict()),
    "rng": [flat(torch.get_rng_state()), repr(random.getstate())],
    "history": history,
    "committed": ks.committed_step,
}
digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
target = Path(args.out) / f"rank-{rank}.json"
target.with_suffix(".tmp").write_text(json.dumps({"sha256": digest, "state": state}))
target.with_suffix(".tmp").rename(target)
