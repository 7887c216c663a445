"""Random transforms in worker processes, drawn from `random`, numpy and torch there.

A worker is seeded once when the pass begins and draws on from sample to sample: a worker that is
started in the middle of the pass draws other numbers.
"""

import random

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import keepstep


class Augmented(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x * random.uniform(0.8, 1.2) + 0.1 * torch.randn_like(x), y


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(85)
    model = DistributedDataParallel(zoolib.mlp())
    zoolib.seed_everything(850 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    data = Augmented(zoolib.vectors())
    loader, sampler = zoolib.sharded_loader(data, num_workers=2)

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
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
