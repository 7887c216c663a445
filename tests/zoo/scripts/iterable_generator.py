"""An IterableDataset that makes samples from a generator of its own.

The stream cannot be entered in the middle, and reading it again gives other samples.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import keepstep


class Stream(IterableDataset):
    def __init__(self, seed, length):
        self.length = length
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        for _ in range(self.length):
            x = torch.randn(16, generator=self.generator)
            yield x, x[:4].argmax()


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(81)
    model = DistributedDataParallel(zoolib.mlp())
    zoolib.seed_everything(810 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    data = Stream(seed=rank, length=64)
    loader = DataLoader(data, batch_size=8)

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for _ in ks.epochs(2):
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, rng=data.generator.get_state())


if __name__ == "__main__":
    main()
