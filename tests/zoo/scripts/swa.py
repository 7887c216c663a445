"""Stochastic weight averaging: AveragedModel and SWALR per epoch, BatchNorm updated at the end.

The averaged model and both schedulers change between epochs, and `update_bn` runs forward passes
of a model that is not wrapped.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(51)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(510 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    swa_model = AveragedModel(model.module)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    swa_start = 1
    ks = keepstep.attach(model, optimizer, scheduler=[scheduler, swa_scheduler], swa=swa_model)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(64))

    @ks.step
    def train_step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(4):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
        if epoch >= swa_start:
            swa_model.update_parameters(model.module)
            swa_scheduler.step()
        else:
            scheduler.step()
    update_bn(loader, swa_model)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, swa=swa_model,
                  schedulers=[scheduler, swa_scheduler])  # fmt: skip


if __name__ == "__main__":
    main()
