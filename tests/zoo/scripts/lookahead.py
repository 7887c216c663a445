"""Lookahead by hand: every fifth step the weights go half way back to the slow ones.

The wrapper counts and keeps slow weights in its own attributes, and moves the weights behind the
inner optimizer's update.
"""

import torch
import zoolib
from torch import nn

import keepstep


class Lookahead:
    def __init__(self, optimizer, k=5, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.counter = optimizer, k, alpha, 0
        groups = optimizer.param_groups
        self.slow = [[p.detach().clone() for p in group["params"]] for group in groups]

    def zero_grad(self):
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.counter += 1
        if self.counter % self.k == 0:
            for group, slow in zip(self.optimizer.param_groups, self.slow):
                for p, q in zip(group["params"], slow):
                    q.add_(p.detach() - q, alpha=self.alpha)
                    p.copy_(q)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(137)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(1370 + rank)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer = Lookahead(adam)
    ks = keepstep.attach(model, adam)
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
    zoolib.finish(args, losses, model=model, adam=adam, slow=optimizer.slow,
                  counter=optimizer.counter)  # fmt: skip


if __name__ == "__main__":
    main()
