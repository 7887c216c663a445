"""25 million parameters, all dense and all trained by DDP, in a step that is short on a CPU.

Few large layers and a batch of four rows: forward and backward read each weight a few times and
little more, so that state to be moved is large compared with the time of a step. AdamW (fused)
and not SGD, though SGD's state would be a third: three times 100 MB is what a move must copy in
practice. Every committed step is logged with its time; see drive.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--build-s", type=float, default=0.0, help="time that construction takes")
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
parser.add_argument("--checkpoint-every", type=int, default=0)
args = parser.parse_args()

rank = int(os.environ["RANK"])
if args.device == "cuda":
    os.environ["NCCL_HOSTID"] = f"bench-{os.getpid()}"  # ranks that share one GPU
    torch.cuda.set_device(0)
dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
out = Path(args.out)
time.sleep(args.build_s)
torch.manual_seed(0)
layers: list[nn.Module] = []
for _ in range(args.layers):
    layers += [nn.Linear(args.width, args.width), nn.Tanh()]
net = nn.Sequential(*layers).to(args.device)
ddp = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
optimizer: torch.optim.Optimizer
if args.optimizer == "adamw":
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
else:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)

# What a script does that survives by restarting: load the newest checkpoint, save every n steps.
checkpoint = out / "checkpoint.pt"
start = 0
if args.checkpoint_every and checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]

log = os.open(out / f"rank-{rank}.commits", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
record = struct.Struct("<qqq")
ks = keepstep.attach(ddp, optimizer)


@ks.step
def train_step(step: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.randn(4, args.width, generator=chance).to(args.device)
    loss = nn.functional.mse_loss(ddp(x), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if args.device == "cuda":
        torch.cuda.synchronize()  # a commit is logged when the device has made it
    # Here and not after the call: this step stands from now on, and a planned hold, if there is
    # one, lies between here and the call's return. (A newcomer's warm-up is logged too, by its
    # own pid: readers look at ranks that were not moved.)
    os.write(log, record.pack(step + 1, time.monotonic_ns(), os.getpid()))
    return loss.detach()


def save(step: int) -> None:
    state: dict[str, Any] = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
    }
    torch.save(state, checkpoint.with_suffix(".tmp"))
    checkpoint.with_suffix(".tmp").rename(checkpoint)


for step in ks.batches(range(start, args.steps)):
    train_step(step)
    if args.checkpoint_every and rank == 0 and (step + 1) % args.checkpoint_every == 0:
        save(step + 1)

digest = hashlib.sha256()
for parameter in net.parameters():
    digest.update(parameter.detach().cpu().numpy().tobytes())
(out / f"rank-{rank}.json").write_text(json.dumps({"sha256": digest.hexdigest()}))
