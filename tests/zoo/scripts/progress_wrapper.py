"""A progress bar in the manner of tqdm around the protected loop, with postfix and ETA.

The wrapper counts the batches that pass and asks the iterable for its length.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Bar:
    def __init__(self, iterable, total):
        self.iterable, self.total, self.n, self.postfix = iterable, total, 0, {}

    def __iter__(self):
        for item in self.iterable:
            yield item
            self.n += 1
            print(f"{self.n}/{self.total} {self.postfix}", end="\r")

    def set_postfix(self, **values):
        self.postfix = {k: f"{v:.3f}" for k, v in values.items()}


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(120)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1200 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, bars = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        bar = Bar(ks.batches(loader), total=len(loader))
        for x, y in bar:
            losses.append(train_step(x, y))
            bar.set_postfix(loss=losses[-1])
        bars.append(bar.n)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, bars=bars)


if __name__ == "__main__":
    main()
