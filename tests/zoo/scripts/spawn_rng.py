"""Numpy's way to have a stream for each epoch: `rng.spawn(1)`.

How many children a generator has spawned is not part of its bit generator's state.
"""

import numpy as np
import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(502)
    model = DistributedDataParallel(zoolib.mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    root = np.random.default_rng(5020 + rank)
    x, y = zoolib.vectors(64).tensors

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for _ in range(4):
        (rng,) = root.spawn(1)
        order = rng.permutation(64)
        for i in range(0, 32, 8):
            noise = torch.from_numpy(rng.normal(size=(8, 16)).astype(np.float32))
            batch = order[i : i + 8]
            losses.append(train_step(x[batch] + 0.1 * noise, y[batch]))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, last=root.spawn(1)[0].random())


if __name__ == "__main__":
    main()
