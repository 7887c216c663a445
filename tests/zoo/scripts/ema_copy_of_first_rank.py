"""A deep copy of the model that follows it, on rank 0 only, and registered nowhere.

It is found there once it has changed, and no other rank has it. All have a scheduler that nobody
registers, either.
"""

import copy

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


@torch.no_grad()
def follow(ema, net):
    for mine, theirs in zip(ema.parameters(), net.parameters(), strict=True):
        mine.lerp_(theirs, 0.1)
    for mine, theirs in zip(ema.buffers(), net.buffers(), strict=True):
        mine.copy_(theirs)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(53)
    net = nn.Sequential(nn.Linear(16, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(530 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    ks = keepstep.attach(model, optimizer)
    ema = copy.deepcopy(net).requires_grad_(False) if rank == 0 else None
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
            if ema is not None:
                follow(ema, net)
        scheduler.step()
    zoolib.finish(args, losses, model=model, optimizer=optimizer, ema=ema and ema.state_dict())


if __name__ == "__main__":
    main()
