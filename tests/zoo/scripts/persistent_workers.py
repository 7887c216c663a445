"""A shuffling DataLoader with a persistent worker process.

The order of an epoch and the worker's seed come from the global stream when the iterator is made,
and the worker lives on into the next epoch.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

import keepstep


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(82)
    model = DistributedDataParallel(zoolib.mlp())
    zoolib.seed_everything(820 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    data = Subset(zoolib.vectors(), range(rank, 128, world))
    loader = DataLoader(data, 8, shuffle=True, num_workers=1, persistent_workers=True)

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
