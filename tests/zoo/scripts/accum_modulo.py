"""Gradient accumulation the common way: `if (i + 1) % accum == 0: optimizer.step()`.

Every micro-batch is a protected step that synchronises; whether it updates depends on the index of
`enumerate`, and gradients outlive the steps that do not.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(65)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(650 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    accum = 3

    @ks.step
    def train_step(i, x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        (loss / accum).backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    losses, global_step = [], 0
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            losses.append(train_step(i, x, y))
            if (i + 1) % accum == 0:
                global_step += 1
    zoolib.finish(args, losses, model=model, optimizer=optimizer, global_step=global_step)


if __name__ == "__main__":
    main()
