"""Cosine annealing with warm restarts, stepped with a fraction of the epoch.

`scheduler.step(epoch + i / iters)` takes its place from `enumerate`, not from its own count.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(111)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1110 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1)
    ks = keepstep.attach(model, optimizer, scheduler=scheduler)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, iters = [], len(loader)
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            losses.append(train_step(x, y))
            scheduler.step(epoch + i / iters)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
