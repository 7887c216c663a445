"""ReduceLROnPlateau per epoch, by the mean of the epoch's training losses.

The scheduler remembers its best value and its bad epochs, and the mean is of a list of the epoch.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(107)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1070 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.1
    )
    ks = keepstep.attach(model, optimizer, scheduler=scheduler)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(64))

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @ks.section
    def mean_over_ranks(value):
        total = torch.tensor(value)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    losses = []
    for epoch in ks.epochs(4):
        sampler.set_epoch(epoch)
        epoch_losses = []
        for x, y in ks.batches(loader):
            epoch_losses.append(train_step(x, y))
        losses += epoch_losses
        scheduler.step(mean_over_ranks(sum(epoch_losses) / len(epoch_losses)))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
