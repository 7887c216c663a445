"""`for x, y in loader:`, as in any script: the author has forgotten `ks.batches`.

Nobody could tell a replacement where to go on in that loop.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(572)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5720 + rank)
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

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
