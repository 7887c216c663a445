"""Activation checkpointing of blocks with dropout.

The backward pass runs forward passes again with the random state they had: the stream goes back
and forth inside the step.
"""

import torch
import zoolib
from torch import nn
from torch.utils.checkpoint import checkpoint

import keepstep


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.relu(self.fc(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), Block()
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in (self.a, self.b, self.c):
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(95)
    model = zoolib.spread(Net(), args)
    torch.manual_seed(950 + rank)
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

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
