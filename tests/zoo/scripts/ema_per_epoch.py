"""An average of the weights that is updated once per epoch, through a copy of the model.

The copy is registered and changes after the last step of an epoch, where epochs are counted.
"""

import copy

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(56)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(560 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ema = copy.deepcopy(net).requires_grad_(False)
    ks = keepstep.attach(model, optimizer, ema=ema)
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
        with torch.no_grad():
            for average, value in zip(ema.parameters(), net.parameters()):
                average.lerp_(value, 0.3)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, ema=ema)


if __name__ == "__main__":
    main()
