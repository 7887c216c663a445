"""A replay buffer that is a list and a moving average that is a deque, with attributes.

The buffer has a position beside its items, and the average a running total.
"""

import random
from collections import deque

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class ReplayBuffer(list):
    def __init__(self, capacity):
        super().__init__()
        self.capacity, self.position = capacity, 0

    def push(self, item):
        if len(self) < self.capacity:
            self.append(item)
        else:
            self[self.position] = item
        self.position = (self.position + 1) % self.capacity


class Moving(deque):
    total = 0.0

    def push(self, value):
        if len(self) == self.maxlen:
            self.total -= self[0]
        self.append(value)
        self.total += value

    def mean(self):
        return self.total / max(1, len(self))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(512)
    model = DistributedDataParallel(zoolib.mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    zoolib.seed_everything(5120 + rank)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    memory, moving = ReplayBuffer(12), Moving(maxlen=4)

    @ks.step
    def train_step(x, y, weight):
        loss = weight * nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            for i in range(5):
                memory.push((x[i].tolist(), int(y[i])))
            old = random.sample(memory, 4)
            x = torch.cat([x, torch.tensor([o[0] for o in old])])
            y = torch.cat([y, torch.tensor([o[1] for o in old])])
            losses.append(train_step(x, y, 1 / (1 + moving.mean())))
            moving.push(losses[-1])
    zoolib.finish(args, losses, model=model, optimizer=optimizer, memory=list(memory),
                  own=[memory.position, moving.total, list(moving)])  # fmt: skip


if __name__ == "__main__":
    main()
