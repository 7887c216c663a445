"""Windows of smoothed values that a logger makes when it first hears of a name.

`deque(maxlen=...)` and `defaultdict(...)` have a length and a factory, which are no items.
"""

from collections import defaultdict, deque

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Logger:
    def __init__(self):
        self.windows = {}
        self.by_phase = defaultdict(lambda: defaultdict(list))

    def log(self, name, value, phase):
        if name not in self.windows:
            self.windows[name] = deque(maxlen=3)
        self.windows[name].append(value)
        self.by_phase[phase][name].append(value)

    def mean(self, name):
        window = self.windows.get(name)
        return sum(window) / len(window) if window else 0.0


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(511)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5110 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    logger = Logger()

    @ks.step
    def train_step(x, y, weight):
        loss = nn.functional.cross_entropy(model(x), y) * weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            losses.append(train_step(x, y, 1 + 0.1 * logger.mean("loss/even")))
            phase = "warm" if epoch == 0 and i < 4 else "main"
            logger.log("loss/even" if i % 2 == 0 else "loss/odd", losses[-1], phase)
    zoolib.finish(args, losses, model=model, optimizer=optimizer,
                  windows={k: list(v) for k, v in logger.windows.items()},
                  by_phase=logger.by_phase)  # fmt: skip


if __name__ == "__main__":
    main()
