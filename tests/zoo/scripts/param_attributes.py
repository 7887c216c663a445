"""Statistics kept on the parameters themselves, as synaptic intelligence and AdaHessian do.

`p.omega`, `p.old` and `p.count` are attributes of Parameter objects; no dict of the script has
them.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(514)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5140 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for p in model.parameters():
        p.omega, p.old, p.count = torch.zeros_like(p), p.detach().clone(), 0
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        loss = loss + sum((p.omega * (p - p.old) ** 2).sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.count += 1
                p.omega.mul_(0.9).add_(p.grad.abs(), alpha=0.1 / p.count)
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
        for p in model.parameters():
            p.old = p.detach().clone()
    zoolib.finish(
        args,
        losses,
        model=model,
        optimizer=optimizer,
        own=[(p.omega, p.old, p.count) for p in model.parameters()],
    )


if __name__ == "__main__":
    main()
