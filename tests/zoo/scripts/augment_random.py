"""Transforms in torchvision's manner that draw from Python's global `random`.

The draws happen in `__getitem__` in the training process, between those of the script.
"""

import random

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import keepstep


class RandomHorizontalFlip:
    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, x):
        return x.flip(0) if random.random() < self.p else x


class RandomScale:
    def __call__(self, x):
        return x * random.uniform(0.8, 1.2)


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for t in self.transforms:
            x = t(x)
        return x


class Augmented(Dataset):
    def __init__(self, data, transform):
        self.data, self.transform = data, transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return self.transform(x), y


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(84)
    model = DistributedDataParallel(zoolib.mlp())
    zoolib.seed_everything(840 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    transform = Compose([RandomHorizontalFlip(), RandomScale()])
    loader, sampler = zoolib.sharded_loader(Augmented(zoolib.vectors(), transform))

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
