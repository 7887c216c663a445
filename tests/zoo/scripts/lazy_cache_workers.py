"""A caching dataset in persistent workers: what each has drawn once stays in its memory.

Each sample gets its noise when a worker first meets it; in later epochs it comes out of the
worker's cache.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import keepstep


class Cached(Dataset):
    def __init__(self, x, y):
        self.x, self.y, self.cache = x, y, {}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = self.x[i] + 0.3 * torch.randn(16)
        return self.cache[i], self.y[i]


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(517)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5170 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    x, y = (t[rank::world] for t in zoolib.vectors(64).tensors)
    loader = DataLoader(
        Cached(x, y), 8, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for _ in ks.epochs(4):
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
