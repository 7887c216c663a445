"""Weight decay by hand between the steps, decoupled from the optimizer.

Weights are multiplied after the protected step, with the learning rate of the moment.
"""

import torch
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(114)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(1140 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    ks = keepstep.attach(model, optimizer, scheduler=scheduler)
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
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        if p.ndim > 1:
                            p.mul_(1 - group["lr"] * 0.5)
            scheduler.step()
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
