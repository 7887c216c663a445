"""Jobs whose model is spread over the ranks, one per `--layout`.

ddp-groups  DDP over two halves of the world, and a group of its own for the losses
fsdp        fully_shard, one dimension; gradient accumulation, clipping, prefetch
hsdp        fully_shard on a mesh with a dimension of replicas
tp          column and row parallel layers, one dimension
fsdp-tp     both, on a mesh of two dimensions
pipeline    each rank has other layers, and sends activations to the next

All have tied or frozen parameters, dropout, accumulation, clipping by the global norm and an
average of the weights; `--bf16`, `--recompute` (activation checkpointing) and `--ema` add to that.
Vocabulary and widths are such that shards are uneven.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--layout", required=True)
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--micro", type=int, default=2)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--ema", action="store_true")
parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd"])
parser.add_argument("--device", default="cpu")
parser.add_argument("--backend", default="gloo")
parser.add_argument("--slow", default="", help="steps take 0.2 s while this file exists")
args = parser.parse_args()

WORDS, WIDTH, HIDDEN, LAYERS, BATCH, LENGTH = 101, 24, 40, 3, 2, 7
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if args.device == "cuda":
    torch.cuda.set_device(0)
dist.init_process_group(args.backend)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))
        return y


class Net(nn.Module):
    """A tiny language model; the head shares its weights with the embedding."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.blocks[0].norm.bias.requires_grad_(False)  # frozen

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if args.recompute else block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def tensor_parallel(net: Net, mesh: DeviceMesh) -> None:
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard(net: Net, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    more: dict[str, Any] = {"mp_policy": policy} if args.bf16 else {}
    blocks = list(net.blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh, **more)
    fully_shard(net, mesh=mesh, **more)
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


torch.manual_seed(5)
net: nn.Module
data_rank, data_world = rank, world  # who gets which samples
if args.layout == "pipeline":
    torch.manual_seed(5 + rank)
    net = nn.Sequential(*(Block() for _ in range(1 + rank % 2)))
    if rank == 0:
        net = nn.Sequential(nn.Embedding(WORDS, WIDTH), *net)
    if rank == world - 1:
        net = nn.Sequential(*net, nn.Linear(WIDTH, WORDS))
    data_rank, data_world = 0, 1
else:
    whole = Net(tie=args.layout not in ("tp", "fsdp-tp"))
    net = whole.to(args.device)
    if args.layout == "ddp-groups":
        halves = [dist.new_group([0, 1]), dist.new_group(list(range(2, world)))]
        losses = dist.new_group(list(range(world)))
        net = nn.parallel.DistributedDataParallel(
            whole, process_group=halves[rank >= 2], bucket_cap_mb=0.004
        )
    elif args.layout == "fsdp":
        shard(whole, init_device_mesh(args.device, (world,), mesh_dim_names=("dp",)))
    elif args.layout == "hsdp":
        shard(whole, init_device_mesh(args.device, (2, world // 2), mesh_dim_names=("r", "s")))
    elif args.layout == "tp":
        tensor_parallel(whole, init_device_mesh(args.device, (world,), mesh_dim_names=("tp",)))
        data_rank, data_world = 0, 1
    elif args.layout == "fsdp-tp":
        mesh = init_device_mesh(args.device, (world // 2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(whole, mesh["tp"])
        shard(whole, mesh["dp"])
        data_rank, data_world = rank // 2, world // 2
    else:
        raise SystemExit(f"unknown layout {args.layout}")

# Ranks that compute the same must drop the same; others must not.
torch.manual_seed(100 + (rank if args.layout == "pipeline" else data_rank))
trained = [p for p in net.parameters() if p.requires_grad]
optimizer: torch.optim.Optimizer
if args.optimizer == "adamw":
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
else:
    optimizer = torch.optim.SGD(trained, lr=3e-2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
history: list[Any] = []
average = {name: p.detach().clone() for name, p in net.named_parameters()} if args.ema else {}


def update_average() -> None:
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            average[name].lerp_(parameter, 0.1)


ks = keepstep.attach(net, optimizer, scheduler=scheduler)
ks.register(
    "history", lambda: list(history), lambda s: history.__setitem__(slice(None), s), per_rank=True
)
if args.ema:
    ks.register("average", lambda: dict(average), average.update, after_update=update_average)


class Data(Dataset[Any]):
    def __len__(self) -> int:
        return args.steps * args.micro * BATCH * data_world

    def __getitem__(self, index: int) -> Any:
        words = torch.randint(WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return index, words


def loss_of(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())


def through_the_pipeline(words: torch.Tensor) -> torch.Tensor:
    """Forward and backward of one micro-batch; the last rank knows the loss."""
    shape = (BATCH, LENGTH, WIDTH)
    x = words[:, :-1]
    if rank > 0:
        x = torch.empty(shape)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = net(x)
    if rank < world - 1:
        dist.send(y.detach(), rank + 1)
        gradient = torch.empty(shape)
        dist.recv(gradient, rank + 1)
        y.backward(gradient)
        loss = torch.zeros(())
    else:
        loss = loss_of(y, words) / args.micro
        loss.backward()
    if rank > 0:
        dist.send(x.grad, rank - 1)
    return loss.detach()


def clip() -> None:
    if args.layout == "pipeline":
        squares = torch.stack([p.grad.square().sum() for p in trained]).sum()
        dist.all_reduce(squares)
        scale = torch.clamp(1.0 / (squares.sqrt() + 1e-6), max=1.0)
        for parameter in trained:
            parameter.grad.mul_(scale)
    elif args.layout not in ("tp", "fsdp-tp"):  # plain and sharded gradients do not mix in it
        nn.utils.clip_grad_norm_(trained, 1.0)


@ks.step
def step(rows: Any) -> float:
    ids, words = rows
    words = words.to(args.device)
    total = 0.0
    optimizer.zero_grad()
    for micro in range(args.micro):
        part = words[micro * BATCH : (micro + 1) * BATCH]
        if args.layout == "pipeline":
            total += through_the_pipeline(part).item()
            continue
        if args.layout in ("fsdp", "hsdp") and micro == 0 and ks.committed_step % 2:
            net.set_requires_gradient_sync(False)
        loss = loss_of(net(part[:, :-1]), part) / args.micro
        loss.backward()
        if args.layout in ("fsdp", "hsdp"):
            net.set_requires_gradient_sync(True)
        total += loss.item()
    if args.layout == "ddp-groups":
        mean = torch.tensor(total, device=args.device)
        dist.all_reduce(mean, group=losses)
        total = mean.item()
    clip()
    if args.slow and Path(args.slow).exists():
        time.sleep(0.2)
    history.append([ks.committed_step, ids.tolist(), total])
    optimizer.step()
    scheduler.step()
    return total


@ks.section
def evaluate() -> None:
    """A forward without a backward leaves FSDP2's root gathered."""
    words = torch.arange(LENGTH, device=args.device).repeat(BATCH, 1)
    net.eval()
    with torch.no_grad():
        total = net(words).float().sum() if args.layout != "pipeline" else torch.zeros(())
    net.train()
    if isinstance(total, DTensor):
        total = total.full_tensor()
    total = total.clone()
    dist.all_reduce(total)
    history.append(total.item())


data = Data()
sampler = DistributedSampler(data, data_world, data_rank, seed=3)
loader = DataLoader(data, BATCH * args.micro, sampler=sampler)
for rows in ks.batches(loader):
    step(rows)
    if ks.committed_step % 4 == 0:
        evaluate()
dist.barrier()


def flat(thing: Any) -> Any:
    if isinstance(thing, DTensor):
        thing = thing.to_local()
    if isinstance(thing, torch.Tensor):
        return hashlib.sha256(thing.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(thing, dict):
        return {str(k): flat(v) for k, v in thing.items()}
    return [flat(v) for v in thing] if isinstance(thing, list | tuple) else repr(thing)


state = {
    "model": flat(dict((*net.named_parameters(), *net.named_buffers()))),
    "optimizer": flat(optimizer.state_dict()),
    "scheduler": flat(scheduler.state_dict()),
    "average": flat(average),
    "rng": flat(torch.get_rng_state()),
    "history": history,
    "committed": ks.committed_step,
}
digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
target = Path(args.out) / f"rank-{rank}.json"
target.with_suffix(".tmp").write_text(json.dumps({"sha256": digest, "state": state}))
target.with_suffix(".tmp").rename(target)
