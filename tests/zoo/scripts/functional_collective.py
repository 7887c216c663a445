"""A functional collective between the steps, as DTensors and compiled code make them.

It does not pass the front end of torch.distributed, so nobody sees that it is there: a newcomer
makes it alone, and gets its own number for the sum over all ranks.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import zoolib
from torch import nn

import keepstep


def main():
    args, _, _ = zoolib.start()
    zoolib.seed_everything(3)
    model = zoolib.spread(nn.Linear(16, 4), args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(128))
    criterion = nn.CrossEntropyLoss()

    @ks.step
    def train_step(x, y):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, sums = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
            total = funcol.all_reduce(torch.tensor([losses[-1]]), "sum", dist.group.WORLD)
            sums.append(total.item())
    zoolib.finish(args, losses, model=model, optimizer=optimizer, sums=sums)


if __name__ == "__main__":
    main()
