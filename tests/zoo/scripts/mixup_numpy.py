"""Mixup and label smoothing, with the mixing drawn from numpy's global generator.

`np.random.beta` and a permutation are drawn between the steps, in every rank from its own seed.
"""

import numpy as np
import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(116)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1160 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    np.random.seed(rank)
    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            lam = np.random.beta(0.4, 0.4)
            index = torch.from_numpy(np.random.permutation(len(x)))
            mixed = lam * x + (1 - lam) * x[index]
            target = nn.functional.one_hot(y, 4).float()
            losses.append(train_step(mixed.float(), lam * target + (1 - lam) * target[index]))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
