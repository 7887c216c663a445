"""Semi-supervised: `zip(ks.batches(unlabelled), itertools.cycle(labelled))`, the usual loop.

The few labelled batches go round and round in an `itertools.cycle`.
"""

import itertools

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(531)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5310 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    x, y = (t[rank::world] for t in zoolib.vectors(48).tensors)
    labelled = list(zip(x.split(8), y.split(8)))

    @ks.step
    def train_step(xu, xl, yl):
        loss = (
            nn.functional.cross_entropy(model(xl), yl) - 0.1 * model(xu).softmax(1).amax(1).mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for (xu, _), (xl, yl) in zip(ks.batches(loader), itertools.cycle(labelled)):
            losses.append(train_step(xu, xl, yl))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
