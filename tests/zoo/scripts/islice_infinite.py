"""An endless stream of batches that `itertools.islice` cuts into epochs.

The generator function keeps its place in local variables and is never asked to start again.
"""

import itertools

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def stream(seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(8, 16, generator=g)
        yield x, x[:, :4].argmax(1)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(104)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1040 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    batches = ks.batches(stream(rank))
    for epoch in range(2):
        for x, y in itertools.islice(batches, 8):
            losses.append(train_step(x, y))
        print(f"epoch {epoch} loss {losses[-1]:.4f}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
