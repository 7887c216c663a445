"""Metrics as objects: all_gather_object and a barrier between the steps, rank 0 writes them.

Object collectives outside of steps, and a file that is appended to.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(113)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1130 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, table = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            losses.append(train_step(x, y))
            if i % 3 == 0:
                found = [None] * dist.get_world_size()
                dist.all_gather_object(found, {"rank": rank, "loss": losses[-1]})
                table.append(sum(one["loss"] for one in found))
        if rank == 0:
            with (Path(args.out) / "metrics.txt").open("a") as file:
                file.write(f"{epoch} {table[-1]}\n")
        dist.barrier()
    zoolib.finish(args, losses, model=model, optimizer=optimizer, table=table)


if __name__ == "__main__":
    main()
