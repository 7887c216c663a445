"""A step that fetches the next batch itself, behind its update.

Where the rank stands in its data was published in the fence, one batch earlier.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Feed:
    def __init__(self, batches):
        self.batches = iter(batches)
        self.batch = next(self.batches, None)

    def advance(self):
        self.batch = next(self.batches, None)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(126)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1260 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(feed):
        x, y = feed.batch
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        feed.advance()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        feed = Feed(ks.batches(loader))
        while feed.batch is not None:
            losses.append(train_step(feed))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
