"""The first rank evaluates a copy of the model, and lets go of it.

While it has one, it has a large model that nobody carries. Later it is like any other rank.
"""

import copy

import torch
import torch.distributed as dist
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(57)
    model = zoolib.spread(zoolib.mlp(hidden=1024), args)
    torch.manual_seed(570 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    held_out = zoolib.vectors(32).tensors

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        score = 0.0
        if rank == 0:
            net = copy.deepcopy(model.module).eval()
            with torch.no_grad():
                score = nn.functional.cross_entropy(net(held_out[0]), held_out[1]).item()
        dist.barrier()
        return score

    losses, scores = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
        if epoch == 0:
            scores.append(evaluate())
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scores=scores)


if __name__ == "__main__":
    main()
