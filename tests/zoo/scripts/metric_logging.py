"""Metrics for a log: a bare all_reduce of the loss after every step, and a moving average.

The collective is neither in a step nor in a section; its result goes into a deque of the script.
"""

from collections import deque

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(112)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1120 + rank)
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

    losses, window, log = [], deque(maxlen=5), []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            loss = train_step(x, y)
            losses.append(loss)
            reduced = torch.tensor(loss)
            dist.all_reduce(reduced)
            window.append(reduced.item() / dist.get_world_size())
            if i % 4 == 0:
                log.append(sum(window) / len(window))
                if rank == 0:
                    print(f"epoch {epoch} it {i} loss {log[-1]:.4f}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer, log=log, window=list(window))


if __name__ == "__main__":
    main()
