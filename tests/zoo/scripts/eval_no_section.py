"""Validation through the DDP model between epochs, in no section.

DDP broadcasts the buffers of BatchNorm in the first forward behind a training step, in C++. Each
rank keeps what it found on its own part of the validation set.
"""

import torch
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(3)
    net = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    model = zoolib.spread(net, args)
    zoolib.seed_everything(30 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    train_loader, sampler = zoolib.sharded_loader(zoolib.vectors(128))
    val_loader, _ = zoolib.sharded_loader(zoolib.vectors(32))
    criterion = nn.CrossEntropyLoss()

    @ks.step
    def train_step(x, y):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def validate():
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, y in val_loader:
                total += criterion(model(x), y).item()
        model.train()
        return total

    losses, history, best = [], [], float("inf")
    for epoch in ks.epochs(3):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(train_loader):
            losses.append(train_step(x, y))
        history.append(validate())
        best = min(best, history[-1])
    zoolib.finish(args, losses, model=model, optimizer=optimizer, history=history, best=best)


if __name__ == "__main__":
    main()
