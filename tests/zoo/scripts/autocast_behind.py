"""A forward pass behind the update, in one `with torch.autocast`: the loss after the step.

Autocast keeps its copies of the weights until the block ends, so that pass has the weights of
before the update. A rank that is lost there takes them with it.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(612)
    model = DistributedDataParallel(zoolib.mlp(dropout=0.0))
    torch.manual_seed(6120 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return nn.functional.cross_entropy(model.module(x), y).item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
