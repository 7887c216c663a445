"""An average of the weights in a copy of the model, written with `p.data = ...`, never registered.

The parameters stay, and their memory is another after every update.
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
        mine.data = mine.data.lerp(theirs.data, 0.1)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(53)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(530 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    ema = copy.deepcopy(net).requires_grad_(False)
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
            follow(ema, net)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, ema=ema.state_dict())


if __name__ == "__main__":
    main()
