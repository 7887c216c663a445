"""A compiled model inside DDP, with dropout, and a shape that changes in the last batch.

Compilation happens in the first step and again for the short batch at the end of an epoch.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(93)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(930 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    compiled = torch.compile(model, backend="eager")
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(120))

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(compiled(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
