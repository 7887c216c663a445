"""Gradient noise that is annealed by a counter in the closure of the step.

Noise is drawn before the update, its size depends on a list that the step itself changes.
"""

import torch
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(115)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(1150 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    t = [0]
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        sigma = (0.01 / (1 + t[0]) ** 0.55) ** 0.5
        t[0] += 1
        for p in model.parameters():
            grad = p.grad.to_local() if args.fsdp else p.grad
            torch.manual_seed(1000 * t[0] + (rank if args.fsdp else 0))
            grad.add_(sigma * torch.randn(grad.shape))
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, t=t)


if __name__ == "__main__":
    main()
