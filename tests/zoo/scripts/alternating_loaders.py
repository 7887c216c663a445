"""Two tasks with a loader each, in turns, with iterators that are made anew when they end.

The script calls `next` itself, the loaders have different lengths, and the turn is a counter.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(102)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1020 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loaders = [zoolib.sharded_loader(zoolib.vectors(n))[0] for n in (80, 64)]

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    iterators = [iter(ks.batches(loader)) for loader in loaders]
    losses = []
    for step in range(16):
        turn = step % 2
        try:
            x, y = next(iterators[turn])
        except StopIteration:
            iterators[turn] = iter(ks.batches(loaders[turn]))
            x, y = next(iterators[turn])
        losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
