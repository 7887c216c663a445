"""Mixup drawn inside the step from a numpy Generator that the script made.

The step draws from a generator that no module and no loader knows, before it is committed.
"""

import numpy as np
import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def mix(dice, x):
    lam = float(dice.beta(0.4, 0.4))
    return lam * x + (1 - lam) * x[torch.from_numpy(dice.permutation(len(x)))]


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(117)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1170 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    dice = np.random.default_rng(rank)

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(mix(dice, x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(
        args, losses, model=model, optimizer=optimizer, dice=repr(dice.bit_generator.state)
    )


if __name__ == "__main__":
    main()
