"""A Dataset that augments with a numpy Generator of its own.

`np.random.default_rng` is the state of an object inside the dataset that the loader holds.
"""

import numpy as np
import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import keepstep


class Augmented(Dataset):
    def __init__(self, data, seed):
        self.data = data
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        noise = torch.from_numpy(self.rng.normal(0, 0.1, x.shape)).float()
        return x + noise, y


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(78)
    model = DistributedDataParallel(zoolib.mlp())
    zoolib.seed_everything(780 + rank)
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
    zoolib.finish(
        args, losses, model=model, optimizer=optimizer, rng=repr(data.rng.bit_generator.state)
    )


if __name__ == "__main__":
    main()
