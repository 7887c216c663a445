"""A sampler that counts its own epochs, so that nobody has to call set_epoch.

Every `iter(sampler)` adds one to `self.epoch`, from which the order is drawn.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

import keepstep


class EpochSampler(Sampler):
    def __init__(self, data, seed=0):
        self.size, self.seed, self.epoch = len(data), seed, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        self.epoch += 1
        return iter(torch.randperm(self.size, generator=g)[self.rank :: self.world].tolist())

    def __len__(self):
        return self.size // self.world


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(75)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(750 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    data = zoolib.vectors(96)
    sampler = EpochSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for _ in ks.epochs(3):
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, epoch=sampler.epoch)


if __name__ == "__main__":
    main()
