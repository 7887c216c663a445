"""A registered meter that the first rank alone updates, since the second epoch; it is lost there.

Nobody knows what it had, and no other rank has seen the meter change.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Meter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def update(self, x, loss):
        self.total += x.sum(0)[:4] * loss
        self.seen += 1


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(53)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(530 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    meter = Meter()
    ks = keepstep.attach(model, optimizer, meter=meter)
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
            if epoch > 0 and rank == 0:
                meter.update(x, losses[-1])
    zoolib.finish(args, losses, model=model, optimizer=optimizer, meter=meter.state_dict())


if __name__ == "__main__":
    main()
