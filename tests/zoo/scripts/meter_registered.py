"""A registered meter, updated in the step, of what each rank has seen since the second epoch.

Nobody said that it differs between ranks, and until then it does not.
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
        if epoch > 0:
            meter.update(x, loss.item())
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, meter=meter.state_dict())


if __name__ == "__main__":
    main()
