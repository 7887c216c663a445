"""A mean teacher that lives in the function that trains, and ends with it.

The other ranks have let go of it where they wait for a rank that was lost in the last step: the
newcomer of that one still reads it.
"""

import copy

import torch
import torch.distributed as dist
import zoolib
from torch import nn

import keepstep


def train(model, optimizer, ks, got):
    teacher = copy.deepcopy(model.module).requires_grad_(False)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y, teacher):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, p in zip(teacher.parameters(), model.parameters(), strict=True):
                average.lerp_(p, 0.1)
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y, teacher))
    got["teacher"] = {k: v.clone() for k, v in teacher.state_dict().items()}
    return losses


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(57)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(570 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    got = {}
    losses = train(model, optimizer, ks, got)
    dist.barrier()
    zoolib.finish(args, losses, model=model, optimizer=optimizer, **got)


if __name__ == "__main__":
    main()
