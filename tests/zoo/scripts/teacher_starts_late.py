"""A mean teacher that is registered, and whose forward begins in the second epoch.

It is too large to be copied at every step, and its forward changes the statistics of its norm
before the update, from a step on in which nobody looks at contents any more. Both ranks show it the
same points: its statistics are the same on all of them.
"""

import copy

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(58)
    net = nn.Sequential(
        nn.Linear(16, 512), nn.BatchNorm1d(512, momentum=0.3), nn.ReLU(), nn.Linear(512, 32)
    )
    teacher = copy.deepcopy(net).requires_grad_(False)
    model = DistributedDataParallel(net)
    torch.manual_seed(580 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ks = keepstep.attach(model, optimizer)
    ks.register("teacher", teacher)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    unlabelled = zoolib.vectors(64).tensors[0]

    @ks.step
    def train_step(x, y, points):
        loss = nn.functional.cross_entropy(model(x), y)
        if points is not None:
            loss = loss + nn.functional.mse_loss(net[3](net[2](net[0](points))), teacher(points))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(teacher.parameters(), net.parameters()):
                mean.lerp_(p, 0.1)
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            points = unlabelled[8 * i : 8 * i + 8] if epoch else None
            losses.append(train_step(x, y, points))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, teacher=teacher)


if __name__ == "__main__":
    main()
