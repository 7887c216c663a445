"""One training run that alternates, block by block, between protected and plain steps.

Three variants share the process, the model, the groups and the minutes in which they run: steps
through Keepstep, and twice the same step function called directly over a plain loader, with the
hooks that Keepstep had installed taken out. The two plain variants are the control: whatever they
differ by is not Keepstep. All ranks draw the same order, and DDP keeps them in lockstep. (Plain
steps change the model outside any transaction, so this script could not survive a fault.)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hotpath
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--rounds", type=int, default=120)
parser.add_argument("--block", type=int, default=8, help="steps in a row of one variant")
parser.add_argument("--profile", type=int, default=200, help="profiled steps after the comparison")
parser.add_argument("--rows", type=int, default=2)
parser.add_argument("--layers", type=int, default=4)
args = parser.parse_args()

WIDTH, TOKENS, VOCABULARY = 192, 64, 512
WARM_UP, SETTLE = 10, 2
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(0)
blocks = [
    nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
    for _ in range(args.layers)
]
net = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
torch.manual_seed(1 + rank)
ddp = nn.parallel.DistributedDataParallel(net)
adam = torch.optim.AdamW(net.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + 0.001 * step))
tables = (
    optimizers._global_optimizer_pre_hooks,
    optimizers._global_optimizer_post_hooks,
    ddp._forward_pre_hooks,
)
before = [set(table) for table in tables]
# What Keepstep puts its own functions in the place of; without them a plain step is refused.
PATCHED = ((torch.autograd, "backward"), (type(ddp), "_pre_forward"), (type(ddp), "_sync_buffers"))
originals = [getattr(owner, name) for owner, name in PATCHED]
ks = keepstep.attach(ddp, adam, scheduler=scheduler)


def step(tokens: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    adam.step()
    scheduler.step()
    adam.zero_grad()
    return loss.detach()


class Hooks:
    """What Keepstep hung into torch at attach: a plain step must not pay for it."""

    def __init__(self) -> None:
        self._own = [
            (table, key, hook)
            for table, old in zip(tables, before)
            for key, hook in list(table.items())
            if key not in old
        ]
        self._patches = [getattr(owner, name) for owner, name in PATCHED]
        if ks.protected and not self._own:
            raise SystemExit("Keepstep installed no hooks: this benchmark no longer measures it")

    def on(self, active: bool) -> None:
        for (owner, name), patch, original in zip(PATCHED, self._patches, originals):
            setattr(owner, name, patch if active else original)
        for table, key, hook in self._own:
            if active:
                table[key] = hook
            else:
                table.pop(key, None)


def loader() -> DataLoader[Any]:
    needed = WARM_UP + args.rounds * args.block + SETTLE + args.profile
    count = args.rows * world * needed
    tokens = torch.randint(VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(7))
    data = TensorDataset(tokens)
    return DataLoader(data, args.rows, sampler=DistributedSampler(data, world, rank))


hooks = Hooks()
protected_step = ks.step(step)
protected_batches = iter(ks.batches(loader()))


def plain_batches() -> Iterator[Any]:
    while True:
        yield from loader()


Variant = tuple[Callable[[torch.Tensor], Any], Iterator[Any], bool]
variants: dict[str, Variant] = {
    "protected": (protected_step, protected_batches, True),
    "plain": (step, plain_batches(), False),
    "control": (step, plain_batches(), False),
}


def run(name: str, count: int) -> int:
    function, source, active = variants[name]
    hooks.on(active)
    began = time.perf_counter_ns()
    for _ in range(count):
        function(next(source)[0])
    return time.perf_counter_ns() - began


def thread_cpu_s() -> float:
    """CPU time of Keepstep's own threads in this process."""
    ticks = 0
    for thread in threading.enumerate():
        if thread.name.startswith("keepstep") and thread.native_id is not None:
            stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
            ticks += sum(map(int, stat.rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


for name in variants:
    run(name, WARM_UP)
order = random.Random(11)  # its own generator: the same on all ranks, and no step draws from it
measured: list[dict[str, int]] = []
(Path(args.out) / f"rank-{rank}.begun").touch()
began, threads_before = time.monotonic(), thread_cpu_s()
for _ in range(args.rounds):
    names = list(variants)
    order.shuffle(names)
    measured.append({name: run(name, args.block) for name in names})
window_s, threads_s = time.monotonic() - began, thread_cpu_s() - threads_before
(Path(args.out) / f"rank-{rank}.measured").touch()

run("protected", SETTLE)
profile = hotpath.Profile()
if ks.protected:
    profile.install()
profiled: list[int] = []
for _ in range(args.profile):
    began_ns = time.perf_counter_ns()
    run("protected", 1)
    profiled.append(time.perf_counter_ns() - began_ns)
    profile.close_step()
profile.remove()
round_trips = hotpath.fence_round_trips(300) if ks.protected else []

result = {
    "parameters": sum(p.numel() for p in net.parameters()),
    "tensors": sum(1 for _ in net.parameters()),
    "block": args.block,
    "rounds": measured,
    "window_s": window_s,
    "keepstep_threads_cpu_s": threads_s,
    "profile": profile.steps,
    "witnesses_ns": [hotpath.witnesses(one) for one in profile.steps],
    "profiled_step_ns": profiled,
    "fence_round_trip_ns": round_trips,
    "missing_probes": profile.missing,
}
target = Path(args.out) / f"rank-{rank}.json"
target.with_suffix(".tmp").write_text(json.dumps(result))
target.with_suffix(".tmp").rename(target)
