"""`while step < max_steps` over a generator that cycles through the loader for ever.

The cycle is a generator around the protected loop that reshuffles by its own count of passes.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def cycle(ks, loader, sampler):
    passes = 0
    while True:
        sampler.set_epoch(passes)
        yield from ks.batches(loader)
        passes += 1


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(105)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1050 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=15)
    ks = keepstep.attach(model, optimizer, scheduler=scheduler)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(96))

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    step, losses = 0, []
    data_iter = cycle(ks, loader, sampler)
    while step < 15:
        x, y = next(data_iter)
        losses.append(train_step(x, y))
        scheduler.step()
        step += 1
        if step % 5 == 0:
            print(f"{step}: {losses[-1]:.4f}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
