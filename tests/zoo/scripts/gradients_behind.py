"""A step that takes the norm of its gradients behind the update, as many do for their logs.

A replacement of a rank that is lost in between has the new weights, and nobody has the gradients.
Where they are `None`, such code gives 0 without a word.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(43)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(430 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norms = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
        return loss.item(), sum(norms)

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.extend(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
