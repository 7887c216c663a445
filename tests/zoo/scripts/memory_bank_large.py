"""Instance discrimination with a memory bank of a megabyte that the step itself changes in place.

The bank is no buffer and nobody registers it; every rank has one of its own, and writes the rows of
its samples behind the optimizer's update, by a momentum that depends on the step.
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


class NCE:
    def __init__(self, n, dim, momentum=0.5):
        self.bank = nn.functional.normalize(torch.randn(n, dim), dim=1)
        self.momentum = momentum

    def loss(self, features, index):
        return nn.functional.cross_entropy(features @ self.bank.T / 0.2, index)

    def update(self, features, index, step):
        momentum = self.momentum * step / (step + 4)
        mixed = momentum * self.bank[index] + (1 - momentum) * features
        self.bank[index] = nn.functional.normalize(mixed, dim=1)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(32)
    model = DistributedDataParallel(zoolib.mlp(out=256))
    criterion = NCE(1024, 256)
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
        criterion.update(features.detach(), index, ks.committed_step)
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for index, x in ks.batches(loader):
            loss = train_step(index, x)
            losses.append(loss)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, bank=criterion.bank)


if __name__ == "__main__":
    main()
