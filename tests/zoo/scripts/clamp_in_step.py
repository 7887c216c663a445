"""Weights clamped inside the step, right after the update (non-negative layers).

The clamp is no part of the optimizer: a replayed update alone does not give these weights.
"""

import torch
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(18)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(180 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(min=-0.2, max=0.2)
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
        print(f"epoch {epoch} loss {sum(losses[-8:]) / 8:.4f}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
