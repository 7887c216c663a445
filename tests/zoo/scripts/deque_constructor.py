"""A replay memory that is a deque with a constructor of its own, a cache that is an OrderedDict.

`class Memory(deque)` takes a capacity and nothing else; a copy of it cannot be made by its class.
"""

import random
from collections import OrderedDict, deque

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Memory(deque):
    def __init__(self, capacity, name="memory"):
        super().__init__(maxlen=capacity)
        self.name = name

    def sample(self, n):
        return random.sample(list(self), n)


class LRU(OrderedDict):
    def __init__(self, *, size):
        super().__init__()
        self.size = size

    def put(self, key, value):
        self[key] = value
        if len(self) > self.size:
            self.popitem(last=False)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(533)
    model = DistributedDataParallel(zoolib.mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    zoolib.seed_everything(5330 + rank)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    memory, cache = Memory(10), LRU(size=5)

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
        for i, (x, y) in enumerate(ks.batches(loader)):
            memory.extend(zip(x[:3].tolist(), y[:3].tolist()))
            cache.put(i, float(x.mean()))
            old = memory.sample(3)
            x = torch.cat([x, torch.tensor([o[0] for o in old])])
            y = torch.cat([y, torch.tensor([o[1] for o in old])])
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, memory=list(memory),
                  cache=dict(cache))  # fmt: skip


if __name__ == "__main__":
    main()
