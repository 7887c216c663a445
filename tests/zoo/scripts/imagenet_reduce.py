"""The ImageNet example with `range` for the epochs and meters that are reduced over the ranks.

`for epoch in range(n)` starts at 0 in another process, and the all_reduce of the meter at the end
of an epoch is a bare collective between steps.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(2)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(8, 4),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    ks = keepstep.attach(model, optimizer, scheduler=scheduler)
    loader, sampler = zoolib.sharded_loader(zoolib.images())

    @ks.step
    def train_step(images, target):
        loss = nn.functional.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    history, epoch_losses = [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        meter = AverageMeter()
        for images, target in ks.batches(loader):
            loss = train_step(images, target)
            meter.update(loss, len(images))
            history.append(loss)
        epoch_losses.append(meter.all_reduce())
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {epoch_losses[-1]:.4f}")
    zoolib.finish(args, history, model=model, optimizer=optimizer, scheduler=scheduler,
                  epoch_losses=epoch_losses)  # fmt: skip


if __name__ == "__main__":
    main()
