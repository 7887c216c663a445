"""Sums and lists in one expression with the step: `total += train_step(x)`, a comprehension.

While the step runs, the old sum and the list so far are operands of the interpreter, under no name.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(141)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1410 + rank)
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

    total, count = 0.0, 0
    for x, y in ks.batches(loader):
        total += train_step(x, y) * (count := count + 1)
    sampler.set_epoch(1)
    losses = [train_step(x, y) for x, y in ks.batches(loader)]
    zoolib.finish(args, losses, model=model, optimizer=optimizer, total=total, count=count)


if __name__ == "__main__":
    main()
