"""Active learning: a pool of unlabelled ids in a set, from which the script moves some each round.

`list(pool)` of a set of numbers has an order that depends on what the set had before.
"""

import random

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(501)
    model = DistributedDataParallel(zoolib.mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    zoolib.seed_everything(5010 + rank)
    data = zoolib.vectors(64)
    x, y = data.tensors
    unlabeled = set(range(64))
    labeled = []

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for _ in range(15):
        picked = random.sample(list(unlabeled), 4)
        unlabeled.difference_update(picked)
        labeled.extend(picked)
        batch = labeled[-8:]
        losses.append(train_step(x[batch], y[batch]))
    zoolib.finish(
        args, losses, model=model, optimizer=optimizer, labeled=labeled, unlabeled=sorted(unlabeled)
    )


if __name__ == "__main__":
    main()
