"""A shuffling DataLoader with two workers, and no sampler that knows of ranks.

Every pass draws its seed from the global stream of the rank, between its other draws.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

import keepstep


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(83)
    model = DistributedDataParallel(zoolib.mlp())
    zoolib.seed_everything(830 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    data = Subset(zoolib.vectors(), range(rank, 128, world))
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2)

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for _ in ks.epochs(2):
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
