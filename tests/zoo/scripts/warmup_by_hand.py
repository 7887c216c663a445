"""Warm-up and decay of the learning rate by hand, from a counter of the script.

A function outside the step writes param_groups from `global_step`, which nobody registers.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def adjust_learning_rate(optimizer, step, base=0.02, warmup=6, total=16):
    lr = base * (step + 1) / warmup if step < warmup else base * (total - step) / (total - warmup)
    for group in optimizer.param_groups:
        group["lr"] = lr


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(110)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, global_step = [], 0
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            adjust_learning_rate(optimizer, global_step)
            losses.append(train_step(x, y))
            global_step += 1
    zoolib.finish(args, losses, model=model, optimizer=optimizer, global_step=global_step)


if __name__ == "__main__":
    main()
