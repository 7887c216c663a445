"""A Dataset that augments with a `random.Random` of its own.

The generator goes on from sample to sample: reading a sample again gives other numbers.
"""

import random

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import keepstep


class Augmented(Dataset):
    def __init__(self, data, seed):
        self.data = data
        self.rng = random.Random(seed)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        if self.rng.random() < 0.5:
            x = -x
        return x + self.rng.gauss(0, 0.1), y


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(77)
    model = DistributedDataParallel(zoolib.mlp())
    zoolib.seed_everything(770 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    data = Augmented(zoolib.vectors(), seed=rank)
    loader, sampler = zoolib.sharded_loader(data)

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
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, rng=repr(data.rng.getstate()))


if __name__ == "__main__":
    main()
