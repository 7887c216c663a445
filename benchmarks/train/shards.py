"""FSDP2 training that alternates, block by block, between keeping its shards in a vault and not.

All variants share the process, the model, the groups and the minutes in which they run. `kept` is
the product as it is; in `off` and in its control the same session has nothing to keep. After a
change to `kept` all bases must be sent once, which an undisturbed job does at its start only: those
steps are not measured. (A job that alternates could not survive a fault.)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

# Ranks that share a GPU talk as if they were on different machines.
os.environ["NCCL_HOSTID"] = f"shards-{os.getpid()}"
os.environ["NCCL_P2P_DISABLE"] = "1"
os.environ["NCCL_SHM_DISABLE"] = "1"
os.environ["NCCL_IB_DISABLE"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["NCCL_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import keepstep
from keepstep.worker.vault import bases, lane, rebuild, vault

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
parser.add_argument("--rounds", type=int, default=8)
parser.add_argument("--block", type=int, default=4, help="measured steps in a row of one variant")
parser.add_argument("--micro", type=int, default=1, help="backward passes of a step")
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--width", type=int, default=192)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=512)
parser.add_argument("--alone", action="store_true", help="rank 0 has all of a model")
args = parser.parse_args()

SETTLE = 2 * bases.RENEW  # steps until the bases are of different versions again
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device(args.device)
if args.device == "cuda":
    torch.cuda.set_device(0)
dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
mesh = init_device_mesh(args.device, (world,))
if args.alone:
    mesh = init_device_mesh(args.device, (world, 1), mesh_dim_names=("of", "shard"))["shard"]
    if rank:
        args.width, args.layers, args.vocabulary, args.rows = 64, 1, 64, 1
torch.manual_seed(0)
layers = [
    nn.TransformerEncoderLayer(
        args.width, args.width // 64, 4 * args.width, 0.0, batch_first=True, norm_first=True
    )
    for _ in range(args.layers)
]
head = nn.Linear(args.width, args.vocabulary)
net = nn.Sequential(nn.Embedding(args.vocabulary, args.width), *layers, head).to(device)
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.device == "cuda" else None
# Embedding and head by themselves: what is reduced together comes when the last of it is there.
for part in (net[0], *layers, head, net):
    fully_shard(part, mesh=mesh, **({"mp_policy": policy} if policy else {}))
adam = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=args.device == "cuda")
ks = keepstep.attach(net, adam)
source = torch.Generator().manual_seed(rank)
live: Any = ks._live  # type: ignore[attr-defined]
keeper = live.redundancy
destination = keeper._destination


@ks.step
def step() -> None:
    adam.zero_grad()
    for micro in range(args.micro):
        shape = (args.rows, args.tokens)
        words = torch.randint(args.vocabulary, shape, generator=source).to(device)
        net.set_requires_gradient_sync(micro == args.micro - 1)
        logits = net(words).flatten(0, 1).float()
        (nn.functional.cross_entropy(logits, words.flatten()) / args.micro).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    adam.step()


class Counted:
    """Bytes that went to the vault."""

    def __init__(self) -> None:
        self.bytes = 0
        enqueue = lane.Lane.enqueue

        def counted(one: Any, kind: Any, version: int, chunk: Any) -> Any:
            self.bytes += chunk.size
            return enqueue(one, kind, version, chunk)

        lane.Lane.enqueue = counted  # type: ignore[method-assign]


counted = Counted()
units = keeper.units


def switch(on: bool) -> None:
    if bool(keeper.units) == on:
        return
    keeper.inventory.units = units if on else []
    live.changes.forget()  # updates of what is not kept are not signed: it would be refused
    if on:  # what is there has a gap now
        destination.open(destination.line.address, fresh=True)
        destination.align()
    for _ in range(SETTLE if on else 1):
        step()


def block(on: bool) -> float:
    switch(on)
    sync()
    began = time.perf_counter()
    for _ in range(args.block):
        step()
    sync()
    return (time.perf_counter() - began) / args.block


def sync() -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def copy_alone() -> float:
    """What a step sends, at a time when nothing else runs: read, hashed, sent, acknowledged."""
    line, version, staging = destination.line, live.version, keeper._bases.staging
    share = keeper._bases.share()
    if keeper._parity is not None:
        keeper._parity._common = version  # it takes bases of this version
    times = []
    for _ in range(5):
        dist.barrier()
        sync()
        began = time.perf_counter()
        if staging is not None:
            staging.reset()
        keeper._bases.put(line, version, share)
        for unit in units:
            keeper.put_gradient(line, unit.index, version, unit.parameter)
        if staging is not None:
            staging.flush()
        line.sync(version, live.aborted)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


VARIANTS = {"kept": True, "off": False, "control": False}
for _ in range(SETTLE):
    step()
gc.collect()
gc.freeze()  # a full collection of what was imported comes once, in whatever step
order = random.Random(11)  # the same on all ranks
rounds: list[dict[str, float]] = []
sent: list[float] = []
for _ in range(args.rounds):
    names = list(VARIANTS)
    order.shuffle(names)
    found = {}
    for name in names:
        switch(VARIANTS[name])
        before = counted.bytes
        found[name] = block(VARIANTS[name])
        if VARIANTS[name]:
            sent.append((counted.bytes - before) / args.block)
    rounds.append(found)
switch(True)
held = vault.fetch(destination.line.address, live.welcome.token, rank, live.version).bytes
staging = keeper._bases.staging


def parity_bytes() -> int:
    """Of the whole group; the holder has them."""
    if keeper._parity is None:
        return 0
    line = keeper._parity
    assert line._line is not None and line._common >= 0, "no parity is kept"
    where, token = line._line.address, live.welcome.token
    reply, _ = rebuild._fetch_parity(where, token, rank, live.version, line._common)
    return sum(cell.size for cell in reply.cells)


result = {
    "parameters": sum(p.numel() for p in net.parameters()),
    "local_parameters": sum(unit.parameter.to_local().numel() for unit in units),
    "units": len(units),
    "block": args.block,
    "rounds": rounds,
    "bytes_per_step": statistics.fmean(sent),
    "vault_bytes": held,
    "vault_reserved": keeper._bases.reserve,
    "parity_bytes": parity_bytes(),
    "pinned_bytes": staging.bytes if staging is not None else 0,
    "copy_alone_s": copy_alone(),
    "device": torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu",
}
target = Path(args.out) / f"rank-{rank}.json"
target.with_suffix(".tmp").write_text(json.dumps(result))
target.with_suffix(".tmp").rename(target)
