"""The best model so far is copied by rank 0 alone, which saves it in the end.

It is too large to be published with every step, and no other rank has it: a replacement of rank 0
could not have it, and one of any other rank does not miss it.
"""

import copy

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(166)
    model = DistributedDataParallel(zoolib.mlp(hidden=1024))
    torch.manual_seed(1660 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(64))

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, best, least = [], None, float("inf")
    for epoch in ks.epochs(4):
        sampler.set_epoch(epoch)
        total = 0.0
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
            total += losses[-1]
        if rank == 0 and total < least:
            least, best = total, copy.deepcopy(model.module)
    parts = {"best": best} if rank == 0 else {}
    zoolib.finish(args, losses, model=model, optimizer=optimizer, **parts)


if __name__ == "__main__":
    main()
