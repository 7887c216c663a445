"""No DataLoader: `for batch in np.random.permutation(n).reshape(-1, 8)` in every epoch.

The loop runs over the rows of an array of numpy that has no name.
"""

import numpy as np
import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(542)
    model = DistributedDataParallel(zoolib.mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    zoolib.seed_everything(5420 + rank)
    x, y = (t[rank::world] for t in zoolib.vectors().tensors)

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for _ in range(2):
        for batch in np.random.permutation(64).reshape(-1, 8):
            losses.append(train_step(x[batch], y[batch]))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
