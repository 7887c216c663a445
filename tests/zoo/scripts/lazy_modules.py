"""Lazy modules: parameters that exist only after a dry run, then DDP and the optimizer.

The dry run draws the weights from the global stream; BatchNorm's statistics have seen one batch.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(122)
    net = nn.Sequential(
        nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(16),
        nn.ReLU(), nn.LazyLinear(4),
    )  # fmt: skip
    loader, sampler = zoolib.sharded_loader(zoolib.images())
    net(next(iter(loader))[0])
    model = DistributedDataParallel(net)
    torch.manual_seed(1220 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ks = keepstep.attach(model, optimizer)

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
