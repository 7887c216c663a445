"""ReduceLROnPlateau in the middle of training, by a smoothed loss that every rank has for itself.

The smoothed value is a local variable that was reduced with a bare all_reduce between steps.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(108)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1080 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    ks = keepstep.attach(model, optimizer, scheduler=scheduler)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, smooth = [], None
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            loss = train_step(x, y)
            losses.append(loss)
            mean = torch.tensor(loss)
            dist.all_reduce(mean)
            smooth = mean.item() if smooth is None else 0.5 * smooth + 0.5 * mean.item()
            if i % 2 == 1:
                scheduler.step(smooth)
    zoolib.finish(
        args, losses, model=model, optimizer=optimizer, scheduler=scheduler, smooth=smooth
    )


if __name__ == "__main__":
    main()
