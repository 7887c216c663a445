"""A transformer on one GPU that alternates, block by block, between protected and plain steps.

As alternate.py, for a device whose host runs ahead: times are taken from one synchronised point to
the next. Rank 0 trains on the GPU. Rank 1 has next to nothing to do, on the CPU: it stands for a
peer that is always there in time, so that what rank 0 waits for is the fence itself. There are no
collectives of training, which would take the same time in all variants.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as optimizers

import keepstep

SIZES = {
    "tiny": (64, 2, 2),  # to try the script without a GPU
    "130M": (768, 12, 12),
    "370M": (1024, 24, 16),
    "1.3B": (2048, 24, 16),
}

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--size", choices=SIZES, required=True)
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--block", type=int, default=8, help="steps in a row of one variant")
args = parser.parse_args()

TOKENS, VOCABULARY = (32, 512) if args.size == "tiny" else (1024, 50304)
WARM_UP = 6
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
there = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(there if rank == 0 else "cpu")
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        parts = self.qkv(self.first(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, width))
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return y


if rank == 0:
    width, layers, heads = SIZES[args.size]
    with device:  # there it takes no time
        body = [Block(width, heads) for _ in range(layers)]
        net = nn.Sequential(nn.Embedding(VOCABULARY, width), *body, nn.Linear(width, VOCABULARY))
    net = net.to(torch.bfloat16)
    batch = torch.randint(VOCABULARY, (args.rows, TOKENS), device=device)
else:
    net = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    batch = torch.zeros(1, 4, dtype=torch.long)
adam = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
tables = (
    optimizers._global_optimizer_pre_hooks,
    optimizers._global_optimizer_post_hooks,
    net._forward_pre_hooks,
)
before = [set(table) for table in tables]
ks = keepstep.attach(net, adam)
ours = [
    (table, key, hook)
    for table, old in zip(tables, before)
    for key, hook in list(table.items())
    if key not in old
]


def step(tokens: torch.Tensor) -> None:
    logits = net(tokens)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    adam.step()
    adam.zero_grad()


Function = Callable[[torch.Tensor], Any]
variants: dict[str, tuple[Function, bool]] = {
    "protected": (ks.step(step), True),
    "plain": (step, False),
    "control": (step, False),
}


def synchronise() -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(name: str, count: int) -> int:
    function, active = variants[name]
    for table, key, hook in ours:
        if active:
            table[key] = hook
        else:
            table.pop(key, None)
    synchronise()
    began = time.perf_counter_ns()
    for _ in range(count):
        function(batch)
    synchronise()
    return time.perf_counter_ns() - began


for name in variants:
    run(name, WARM_UP)
memory = [0, 0]
for index, name in enumerate(("plain", "protected")):  # on both ranks: they meet in each step
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run(name, 2)
    if device.type == "cuda":
        memory[index] = torch.cuda.max_memory_allocated()
order = random.Random(11)
measured: list[dict[str, int]] = []
for _ in range(args.rounds):
    names = list(variants)
    order.shuffle(names)
    measured.append({name: run(name, args.block) for name in names})
result = {
    "parameters": sum(p.numel() for p in net.parameters()),
    "block": args.block,
    "rounds": measured,
    "device": torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu",
    "peak_bytes": dict(zip(("plain", "protected"), memory)),
}
target = Path(args.out) / f"rank-{rank}.json"
target.with_suffix(".tmp").write_text(json.dumps(result))
target.with_suffix(".tmp").rename(target)
