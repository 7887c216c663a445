"""The training script of the chaos suite: everything a step can contain, in a few milliseconds.

Dropout, BatchNorm, gradient accumulation and clipping, two optimizers, schedulers, a GradScaler
that sometimes skips, a shuffling DistributedSampler, DataLoader workers on demand, evaluation with
collectives every few steps and at the end of each epoch, collectives before attach and a last
barrier. Each rank writes a digest of all its state, its losses and its sample ids at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--steps-per-epoch", type=int, default=8)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--evaluate-every", type=int, default=3)
parser.add_argument("--step-ms", type=float, default=0.0, help="extra time per step")
parser.add_argument(
    "--evaluate-s", type=float, default=0.0, help="a long evaluation, with progress"
)
parser.add_argument("--user-error", default="", help="RANK:STEP")
parser.add_argument("--busy-loop", default="", help="RANK:STEP, in the first process only")
parser.add_argument("--build-s", type=float, default=0.0)
parser.add_argument("--stateful", action="store_true", help="an iterable loader with state_dict")
parser.add_argument("--gate", default="", help="wait for this file before the last barrier")
parser.add_argument("--slow", default="", help="steps take --slow-s more while this file exists")
parser.add_argument("--slow-s", type=float, default=0.2)
parser.add_argument("--drag", default="", help="three times that, for the process named in FILE")
args = parser.parse_args()

BATCH, MICRO, WIDTH = 4, 2, 24
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")

seed: list[Any] = [random.SystemRandom().randrange(1 << 30) if False else 1234 + 7 * rank]
dist.broadcast_object_list(seed, src=0)  # everyone continues with rank 0's seed
run_id = torch.tensor([float(rank)])
dist.all_reduce(run_id)
torch.manual_seed(seed[0])


class Data(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return args.steps_per_epoch * BATCH * MICRO * world

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator)
        return index, x, x.roll(1) * 0.5


class Stateful:
    """An iterable loader that knows its own position."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Any:
        data = Data()
        while self.at < args.steps_per_epoch:
            first = (self.at * world + rank) * BATCH * MICRO
            self.at += 1
            rows = [data[first + i] for i in range(BATCH * MICRO)]
            yield [torch.tensor([r[0] for r in rows])] + [
                torch.stack([r[i] for r in rows]) for i in (1, 2)
            ]
        self.at = 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 64),
            nn.GELU(),
            nn.Linear(64, WIDTH),
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.arange(20_000, dtype=torch.float32))  # never changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


time.sleep(args.build_s)
net = Net()
torch.manual_seed(1000 + rank)  # dropout differs between ranks
random.seed(rank)
np.random.seed(rank)
ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.01, broadcast_buffers=False)
adam = torch.optim.AdamW(net.body.parameters(), lr=3e-3, weight_decay=0.01)
sgd = torch.optim.SGD(net.head.parameters(), lr=1e-2, momentum=0.9)
schedulers = [
    torch.optim.lr_scheduler.OneCycleLR(
        adam, 3e-3, total_steps=max(400, args.epochs * args.steps_per_epoch)
    ),
    torch.optim.lr_scheduler.LambdaLR(sgd, lambda s: 1 / (1 + 0.01 * s)),
]
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
history: list[Any] = []

ks = keepstep.attach(ddp, [adam, sgd], scheduler=schedulers, scaler=scaler)
ks.register(
    "history", lambda: list(history), lambda s: history.__setitem__(slice(None), s), per_rank=True
)


def told(spec: str) -> bool:
    if not spec:
        return False
    who, step = map(int, spec.split(":"))
    return rank == who and ks.committed_step == step


@ks.step
def train_step(ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if told(args.user_error):
        raise ValueError("a bug in the training script")
    if told(args.busy_loop) and not keepstep.is_newcomer():
        while True:
            pass
    total = torch.zeros(())
    for part in range(MICRO):
        rows = slice(part * BATCH, (part + 1) * BATCH)
        sync = part == MICRO - 1
        with torch.enable_grad() if sync else ddp.no_sync():
            noise = random.random() * 1e-3 + float(np.random.rand()) * 1e-3
            loss = nn.functional.mse_loss(ddp(x[rows] + noise), y[rows]) / MICRO
            scaler.scale(loss).backward()
        total = total + loss.detach()
    if ks.committed_step == 5:  # every rank: found_inf, the scaler skips both updates
        next(net.head.parameters()).grad.fill_(float("inf"))
    scaler.unscale_(adam)
    scaler.unscale_(sgd)
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    history.append([ks.committed_step, ids.tolist(), total.item()])
    scaler.step(adam)
    scaler.step(sgd)
    scaler.update()
    for scheduler in schedulers:
        scheduler.step()
    adam.zero_grad()
    sgd.zero_grad(set_to_none=False)
    if args.step_ms:
        time.sleep(args.step_ms / 1e3)
    return total


@ks.section
def evaluate() -> float:
    ddp.eval()
    end = time.monotonic() + args.evaluate_s
    while True:
        with torch.no_grad():
            score = net(torch.ones(2, WIDTH) * rank).sum()
        if time.monotonic() >= end:
            break
        time.sleep(0.05)
        ks.progress()
    dist.all_reduce(score)
    ddp.train()
    return score.item()


dataset = Data()
sampler = DistributedSampler(dataset, world, rank, shuffle=True, seed=3)
loader: Any = (
    Stateful()
    if args.stateful
    else DataLoader(
        dataset,
        batch_size=BATCH * MICRO,
        sampler=sampler,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
)
evaluations: list[float] = []
evaluate()
for epoch in ks.epochs(args.epochs):
    sampler.set_epoch(epoch)
    for batch in ks.batches(loader):
        random.random()  # drawn between steps: must be replayed too
        if args.slow and Path(args.slow).exists():
            drag = Path(args.drag)
            named = args.drag and drag.exists() and drag.read_text() == str(os.getpid())
            time.sleep(args.slow_s * (3 if named else 1))
        train_step(*batch)
        if args.slow:  # for whoever watches without an orchestrator
            with (Path(args.out) / f"rank-{rank}.steps").open("a") as steps:
                steps.write(".")
        if ks.committed_step % args.evaluate_every == 0:
            evaluations.append(evaluate())
    last = evaluate()

if args.gate:
    while not Path(args.gate).exists():
        time.sleep(0.01)
dist.barrier()


def flat(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return hashlib.sha256(thing.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(thing, dict):
        return {str(k): flat(v) for k, v in thing.items()}
    if isinstance(thing, list | tuple):
        return [flat(v) for v in thing]
    return repr(thing)


state = {
    "model": flat(ddp.state_dict()),
    "optimizers": [flat(adam.state_dict()), flat(sgd.state_dict())],
    "schedulers": [flat(s.state_dict()) for s in schedulers],
    "scaler": flat(scaler.state_dict()),
    "rng": [flat(torch.get_rng_state()), repr(random.getstate()), flat([float(np.random.rand())])],
    "history": history,
    "last_evaluation": last,
    "run": [seed[0], run_id.item()],
    "committed": ks.committed_step,
}
text = json.dumps(state, sort_keys=True)
target = Path(args.out) / f"rank-{rank}.json"
target.with_suffix(".tmp").write_text(
    json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "state": state})
)
target.with_suffix(".tmp").rename(target)
print(f"rank {rank} finished at step {ks.committed_step}", file=sys.stderr)
