"""A generator of numbers of the rank's own, registered as if it were the same on all ranks.

It differs from the start, so that the first fence tells; a rank is lost before it.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Numbers:
    def __init__(self, seed):
        self.value = seed

    def next(self):
        self.value = (1103515245 * self.value + 12345) % (1 << 31)
        return self.value / (1 << 31)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(53)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(530 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    numbers = Numbers(7 + rank)
    ks = keepstep.attach(model, optimizer, numbers=numbers)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x * (1 + numbers.next())), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, numbers=numbers.state_dict())


if __name__ == "__main__":
    main()
