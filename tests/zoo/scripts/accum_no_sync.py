"""Gradient accumulation with one protected step per micro-batch and DDP's `no_sync`.

Most steps have no collective and no update and leave gradients behind, which differ between ranks
until the last of them synchronises.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(64)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(640 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    accumulation = 4

    @ks.step
    def micro_step(x, y):
        with model.no_sync():
            loss = nn.functional.cross_entropy(model(x), y) / accumulation
            loss.backward()
        return loss.item()

    @ks.step
    def last_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y) / accumulation
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            if (i + 1) % accumulation:
                losses.append(micro_step(x, y))
            else:
                losses.append(last_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
