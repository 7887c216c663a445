"""A queue of negatives that every step replaces by a new tensor: `cat`, then a slice.

Nothing is changed in place, so no version counter moves, and the old tensor is gone. It is too
large to be carried with the script's small variables.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import keepstep


class Indexed(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return i, self.data[i][0]


class NegativeQueue:
    def __init__(self, n, dim):
        self.keys = nn.functional.normalize(torch.randn(n, dim), dim=1)

    def loss(self, features, index):
        return nn.functional.cross_entropy(features @ self.keys.T / 0.2, index)

    def enqueue(self, features):
        self.keys = torch.cat([features, self.keys])[: len(self.keys)]


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(32)
    model = DistributedDataParallel(zoolib.mlp(out=256))
    criterion = NegativeQueue(128, 256)
    torch.manual_seed(320 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(Indexed(zoolib.vectors()))

    @ks.step
    def train_step(index, x):
        features = nn.functional.normalize(model(x), dim=1)
        loss = criterion.loss(features, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        criterion.enqueue(features.detach())
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for index, x in ks.batches(loader):
            loss = train_step(index, x)
            losses.append(loss)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, keys=criterion.keys)


if __name__ == "__main__":
    main()
