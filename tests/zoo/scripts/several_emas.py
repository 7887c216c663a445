"""Averages of the weights with several rates, kept in a list and updated in a loop.

Nobody has attached them. The loop's variable leads to the last of them, by a shorter path than the
list.
"""

import copy

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(165)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1650 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rates = [0.5, 0.9, 0.99]
    emas = [copy.deepcopy(model.module).requires_grad_(False) for _ in rates]
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

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
            for ema, rate in zip(emas, rates):
                with torch.no_grad():
                    for mean, now in zip(ema.parameters(), model.parameters()):
                        mean.lerp_(now, 1 - rate)
    zoolib.finish(args, losses, model=model, optimizer=optimizer,
                  **{f"ema{n}": one for n, one in enumerate(emas)})  # fmt: skip


if __name__ == "__main__":
    main()
