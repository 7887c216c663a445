"""State in odd places of functions: keyword-only defaults, defaults of methods, decorated methods.

`@every(3)` on a method counts in a closure; `def note(value, *, seen=[])` collects in its default.
"""

import functools

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def every(n):
    def decorate(function):
        calls = 0

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            nonlocal calls
            calls += 1
            return function(*args, **kwargs) if calls % n == 0 else None

        return wrapper

    return decorate


def smooth(value, *, seen=[]):  # noqa: B006
    seen.append(value)
    return sum(seen[-5:]) / len(seen[-5:])


class Trainer:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    @every(3)
    def decay(self):
        for g in self.optimizer.param_groups:
            g["lr"] *= 0.8

    def best(self, value, found=[float("inf")]):  # noqa: B006
        found[0] = min(found[0], value)
        return found[0]


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(515)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5150 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    trainer = Trainer(optimizer)

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, smoothed = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
            smoothed.append((smooth(losses[-1]), trainer.best(losses[-1])))
            trainer.decay()
    zoolib.finish(args, losses, model=model, optimizer=optimizer, smoothed=smoothed)


if __name__ == "__main__":
    main()
