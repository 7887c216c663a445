"""A Dataset that augments with a torch.Generator of its own.

The generator is in an attribute of a transform inside the dataset, two levels below the loader.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import keepstep


class RandomMask:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, x):
        return x * (torch.rand(x.shape, generator=self.generator) > 0.2)


class Augmented(Dataset):
    def __init__(self, data, seed):
        self.data = data
        self.transform = RandomMask(seed)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return self.transform(x), y


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(79)
    model = DistributedDataParallel(zoolib.mlp())
    zoolib.seed_everything(790 + rank)
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
        args, losses, model=model, optimizer=optimizer, rng=data.transform.generator.get_state()
    )


if __name__ == "__main__":
    main()
