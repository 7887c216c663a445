"""A loss scale that some steps change behind their update, by the loss of their own rank.

Nothing happens there in the first calls, so nobody knows of the change when a rank is lost in the
call that makes the first one; later rank 0 begins to change something that no other rank does.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(37)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(370 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    scale, shift = 1.0, 0.0

    @ks.step
    def train_step(x, y):
        nonlocal scale, shift
        loss = nn.functional.cross_entropy(model(x), y) * scale + shift * model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ks.committed_step % 4 == 3:
            scale = 0.9 * scale + 0.1 * loss.item()
        if rank == 0 and ks.committed_step >= 6:
            shift += 1e-3 * loss.item()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, script=[scale, shift])


if __name__ == "__main__":
    main()
