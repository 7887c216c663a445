"""A large teacher that all ranks have at first, and only the first one keeps.

From then on nobody else has it as the first rank does.
"""

import copy

import torch
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(57)
    model = zoolib.spread(zoolib.mlp(hidden=1024), args)
    teacher = copy.deepcopy(model.module).requires_grad_(False)
    torch.manual_seed(570 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y, mean):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if mean is not None:
            with torch.no_grad():
                for average, p in zip(mean.parameters(), model.parameters(), strict=True):
                    average.lerp_(p, 0.1)
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            if rank != 0 and i == 5:
                teacher = None
            losses.append(train_step(x, y, teacher))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, teacher=teacher)


if __name__ == "__main__":
    main()
