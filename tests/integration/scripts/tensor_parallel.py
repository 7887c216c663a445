"""Tensor parallel training in TorchTitan's way: gradients are placed otherwise than parameters.

Sequence parallel norms are Replicate with gradients that are Partial. Without help the optimizer
all-reduces these in the middle of its update.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import keepstep

WORDS, WIDTH, LENGTH, STEPS = 32, 8, 6, 8
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> Any:
        x = self.embed(words)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(self.last(x))


torch.manual_seed(7)
net = Net()
whole = Replicate()
parallelize_module(
    net,
    mesh,
    {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(whole,)),
        "last": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=whole),
    },
)
parallelize_module(
    net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))}
)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
ks = keepstep.attach(net, optimizer)
unlike: set[str] = set()
losses: list[float] = []
ks.register("losses", lambda: list(losses), lambda s: losses.__setitem__(slice(None), s))
ks.register("unlike", lambda: sorted(unlike), lambda s: (unlike.clear(), unlike.update(s)))


@ks.step
def step(words: torch.Tensor) -> None:
    optimizer.zero_grad()
    logits = net(words[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    for name, p in net.named_parameters():
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:  # type: ignore[attr-defined]
            unlike.add(name)
    losses.append(loss.item())
    optimizer.step()


source = torch.Generator().manual_seed(1)
batches = [torch.randint(WORDS, (2, LENGTH + 1), generator=source) for _ in range(STEPS)]
for words in ks.batches(batches):
    step(words)
state = hashlib.sha256()
for p in net.parameters():
    tensors = [p, *(optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq"))]
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        state.update(local.detach().contiguous().numpy().tobytes())
said = {"rank": rank, "sha256": state.hexdigest(), "losses": losses, "unlike": sorted(unlike)}
os.write(1, f"END {json.dumps(said)}\n".encode())  # one write: ranks share the pipe
