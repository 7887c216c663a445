"""The training script of the GPU suite: all ranks on one GPU, over NCCL.

A small residual network with dropout and BatchNorm, gradient accumulation and clipping, a shuffling
sampler, evaluation with collectives, collectives before attach. `--layout` is ddp, fsdp or hsdp.
Each rank writes a digest of all its state, its losses and its sample ids at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# NCCL refuses two ranks on one GPU of one host. So each process is a host of its own.
os.environ["NCCL_HOSTID"] = f"gpu-test-{os.getpid()}"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep
from keepstep.worker.device import guard

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--layout", default="ddp", choices=["ddp", "fsdp", "hsdp"])
parser.add_argument("--backend", default="nccl")
parser.add_argument("--optimizer", default="fused", choices=["fused", "foreach"])
parser.add_argument("--scaler", action="store_true", help="a GradScaler that skips step 5")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--graph", action="store_true", help="replay a CUDA graph in the step")
parser.add_argument("--control", action="store_true", help="the network plugin takes orders")
parser.add_argument("--other", action="store_true", help="a rank's second process alters batches")
parser.add_argument("--in-place", action="store_true", help="the step changes its batch")
parser.add_argument("--quiet", action="store_true", help="behind the update, nothing but a result")
parser.add_argument("--meter", action="store_true", help="one that differs from epoch 1 on")
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--steps-per-epoch", type=int, default=8)
parser.add_argument("--slow", default="", help="steps take a second while this file exists")
parser.add_argument("--device", default="cuda", help="cpu: to try the script itself")
args = parser.parse_args()

BATCH, MICRO, WIDTH, DEPTH = 8, 2, args.width, 4
torch.use_deterministic_algorithms(True)
if args.device == "cuda":
    torch.cuda.set_device(0)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if args.control:
    os.environ["KEEPSTEP_NET_CONTROL"] = f"{args.out}/control-{rank}-{os.getpid()}"
dist.init_process_group(args.backend or None)
seed: list[Any] = [1234 + 7 * rank]
dist.broadcast_object_list(seed, src=0)
torch.manual_seed(seed[0])


class Data(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return args.steps_per_epoch * BATCH * MICRO * world

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if args.layout == "ddp" else nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.back(nn.functional.gelu(self.wide(self.norm(x)))))


net: Any = nn.Sequential(*[Block() for _ in range(DEPTH)], nn.Linear(WIDTH, WIDTH))
net.to(args.device)
torch.manual_seed(1000 + rank)
random.seed(rank)
model: Any = net
if args.layout == "ddp":
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1, broadcast_buffers=False)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (world,) if args.layout == "fsdp" else (world // 2, 2)
    names = ("replicate", "shard")[2 - len(shape) :]
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=names)
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
called = torch.compile(model) if args.compile else model
kind = {"fused": True} if args.optimizer == "fused" else {"foreach": True}
adam = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01, **kind)
scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda s: 1 / (1 + 0.01 * s))
scaler = torch.amp.GradScaler(args.device, init_scale=256.0, growth_interval=5, enabled=args.scaler)
history: list[Any] = []
# State of the script's own, on the device, that nobody registers: one is changed in place, one is
# bound anew in every step.
bank = torch.zeros(16, WIDTH, device=args.device)
smooth = torch.zeros((), device=args.device)

ks = keepstep.attach(model, adam, scheduler=scheduler, scaler=scaler if args.scaler else None)
ks.register(
    "history", lambda: list(history), lambda s: history.__setitem__(slice(None), s), per_rank=True
)
meter = nn.BatchNorm1d(WIDTH, affine=False).to(args.device)
if args.meter:  # nobody says that it differs between ranks, and at first it does not
    ks.register("meter", meter.state_dict, meter.load_state_dict)
if args.graph:
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        static += 1


def without_sync(last: bool) -> Any:
    if args.layout == "ddp":
        return nullcontext() if last else model.no_sync()
    net.set_requires_gradient_sync(last)
    return nullcontext()


@ks.step
def train_step(ids: torch.Tensor, x: torch.Tensor) -> Any:
    global smooth
    x = x.to(args.device)
    if args.in_place:
        x.mul_(0.5)
    total = torch.zeros((), device=args.device)
    if args.graph:
        graph.replay()
    target = bank.mean(0) * 1e-2 + smooth * 1e-3
    for part in range(MICRO):
        rows = x[part * BATCH : (part + 1) * BATCH]
        with without_sync(part == MICRO - 1):
            loss = (
                called(rows + random.random() * 1e-3) - rows.roll(1, 1) - target
            ).square().mean() / MICRO
            scaler.scale(loss).backward()
        total += loss.detach()
    if args.scaler and ks.committed_step == 5:
        next(net.parameters()).grad.fill_(float("inf"))
    scaler.unscale_(adam)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    history.append([ks.committed_step, ids.tolist()])
    scaler.step(adam)
    scaler.update()
    scheduler.step()
    adam.zero_grad()
    if args.meter and epoch > 0:
        meter(x)
    if args.quiet:
        return total.item()
    bank[ks.committed_step % 16] = x.mean(0)
    smooth = 0.9 * smooth + 0.1 * total
    return total


@ks.section
def evaluate() -> float:
    score = torch.full((1,), float(rank + 1), device=args.device)
    dist.all_reduce(score)
    return score.item()


def on_device(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Many move their batch before the step. FSDP's ranks do it inside."""
    ids, x = batch
    return [ids, x if args.layout != "ddp" else x.to(args.device) + (0.125 if second else 0.0)]


second = False
if args.other:
    started = Path(args.out) / f"started-{rank}"
    second = started.exists()
    started.touch()
data = Data()
sampler = DistributedSampler(data, world, rank, shuffle=True, seed=3)
loader = DataLoader(data, batch_size=BATCH * MICRO, sampler=sampler)
losses: list[Any] = []
evaluate()
for epoch in ks.epochs(args.epochs):
    sampler.set_epoch(epoch)
    for batch in ks.batches(loader):
        if args.slow and Path(args.slow).exists():
            time.sleep(1.0)
        losses.append(train_step(*on_device(batch)))
        if ks.committed_step % 5 == 0:
            evaluate()
    last = evaluate()
dist.barrier()


def flat(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        local = thing.to_local() if hasattr(thing, "to_local") else thing
        return hashlib.sha256(local.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(thing, dict):
        return {str(k): flat(v) for k, v in thing.items()}
    return [flat(v) for v in thing] if isinstance(thing, list | tuple) else repr(thing)


state = {
    "model": flat(dict(net.state_dict())),
    "optimizer": flat(adam.state_dict()),
    "scheduler": flat(scheduler.state_dict()),
    "scaler": flat(scaler.state_dict()),
    "rng": [flat(torch.get_rng_state()), flat(torch.cuda.get_rng_state_all()), random.random()],
    "history": history,
    "script": [flat(bank), flat(smooth)],
    "meter": flat(dict(meter.state_dict())),
    "last": [last, *(float(loss) for loss in losses)],
    "committed": ks.committed_step,
}
digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
target = Path(args.out) / f"rank-{rank}.json"
found = {"sha256": digest, "state": state, "guarded": guard.used()}
target.with_suffix(".tmp").write_text(json.dumps(found))
target.with_suffix(".tmp").rename(target)
