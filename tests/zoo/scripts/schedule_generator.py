"""Learning rates and temperatures that come from generator functions, by `next(...)` in the loop.

What they count is in the local variables of a suspended frame.
"""

import math

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def cosine(base, warm, total):
    step = 0
    while True:
        step += 1
        if step <= warm:
            yield base * step / warm
        else:
            yield base * 0.5 * (1 + math.cos(math.pi * (step - warm) / total))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(504)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5040 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    lrs = cosine(5e-3, 3, 16)
    temperatures = iter(torch.linspace(1.0, 0.5, 20).tolist())

    @ks.step
    def train_step(x, y, t):
        loss = nn.functional.cross_entropy(model(x) / t, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, seen = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            lr, t = next(lrs), next(temperatures)
            for g in optimizer.param_groups:
                g["lr"] = lr
            losses.append(train_step(x, y, t))
            seen.append((lr, t))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, seen=seen)


if __name__ == "__main__":
    main()
