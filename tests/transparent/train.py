"""A script as people write them for torchrun: nothing in it knows of Keepstep.

What it trains is chosen by its arguments; what came out of it goes to OUT/rank-<rank>.json.
"""

import argparse
import hashlib
import json
import os
import socket
import subprocess
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build(layout: str, world: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Linear(64, 10)
    ).to(device)
    if layout == "ddp":
        return DistributedDataParallel(model)
    shape = (2, world // 2) if layout == "hsdp" else (world,)
    names = ("replicate", "shard") if layout == "hsdp" else ("shard",)
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", required=True)
    options.add_argument("--layout", choices=["ddp", "fsdp", "hsdp"], default="ddp")
    options.add_argument("--workers", type=int, default=0)
    options.add_argument("--accumulate", type=int, default=1)
    options.add_argument("--optimizers", type=int, default=1)
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--slow", default="", help="take your time while this file is there")
    options.add_argument("--socket", action="store_true", help="have a socket of your own")
    options.add_argument("--child", action="store_true", help="have a child that is no loader")
    # Plain torch may hang in that: the last owner of the group joins gloo's threads with the
    # interpreter's lock held, which one of them may need.
    options.add_argument("--destroy", action="store_true", help="the groups, as one should")
    options.add_argument("--uneven", action="store_true", help="rank 0 steps twice as often")
    given = options.parse_args()
    listener = socket.create_server(("127.0.0.1", 0)) if given.socket else None
    child = subprocess.Popen(["sleep", "1000"]) if given.child else None
    device = given.device
    if device == "cuda":  # ranks may share one, which NCCL must not notice
        os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(2400, 32), torch.randint(0, 10, (2400,)))
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(
        data,
        batch_size=20,
        sampler=sampler,
        num_workers=given.workers,
        persistent_workers=given.workers > 0,
    )
    model = build(given.layout, world, device)
    parameters = list(model.parameters())
    parts = [parameters[i :: given.optimizers] for i in range(given.optimizers)]
    optimizers = [torch.optim.AdamW(part, lr=1e-3, foreach=False) for part in parts]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 200) for o in optimizers]
    torch.manual_seed(100 + rank)
    losses = hashlib.sha256()
    count = 0
    with open(os.path.join(given.out, f"log.{rank}"), "a", buffering=1) as log:  # noqa: PTH123
        for epoch in range(given.epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                guess = model(x.to(device))
                loss = nn.functional.cross_entropy(guess, y.to(device)) / given.accumulate
                loss.backward()
                count += 1
                losses.update(repr(loss.item()).encode())
                if given.slow and os.path.exists(given.slow):
                    time.sleep(0.2)
                if count % given.accumulate:
                    continue
                for optimizer, schedule in zip(optimizers, schedules):
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if given.uneven and rank == 0:
                    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
                print(f"step {count} {loss.item():.6f}", file=log)
    state = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        state.update(local.detach().cpu().numpy().tobytes())
    parts = {"steps": str(count), "state": state.hexdigest(), "losses": losses.hexdigest()}
    parts["random"] = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    if device == "cuda":
        on_device = torch.cuda.get_rng_state().numpy().tobytes()
        parts["random on the device"] = hashlib.sha256(on_device).hexdigest()
    whole = hashlib.sha256("".join(parts.values()).encode()).hexdigest()
    with open(os.path.join(given.out, f"rank-{rank}.json"), "w") as result:  # noqa: PTH123
        json.dump({"sha256": whole, "state": parts}, result)
    if given.destroy:
        dist.destroy_process_group()
    if listener is not None:
        listener.close()
    if child is not None:
        child.kill()


if __name__ == "__main__":
    main()
