"""Fine-tuning: the backbone is frozen in the first epoch and unfrozen in the second.

`requires_grad` changes at the beginning of an epoch, BatchNorm of the frozen part is in eval mode,
and frozen parameters have no gradients and no optimizer state until they are unfrozen.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.head(self.backbone(x))


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad = flag
    module.train(flag)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(71)
    net = Net()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    torch.manual_seed(710 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        model.train()
        set_trainable(net.backbone, epoch >= 1)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
