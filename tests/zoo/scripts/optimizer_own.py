"""Adam written by hand, with its count of steps and its moments in attributes.

The state_dict of such an optimizer is empty. A rank that is lost inside the update leaves moments
that only other replicas have.
"""

import torch
import zoolib
from torch import nn

import keepstep


class MyAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.t = 0
        self.m = [torch.zeros_like(p) for g in self.param_groups for p in g["params"]]
        self.v = [torch.zeros_like(p) for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        i = 0
        for g in self.param_groups:
            b1, b2 = g["betas"]
            for p in g["params"]:
                if p.grad is not None:
                    m, v = self.m[i], self.v[i]
                    m.mul_(b1).add_(p.grad, alpha=1 - b1)
                    v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                    mh = m / (1 - b1**self.t)
                    vh = v / (1 - b2**self.t)
                    p.add_(mh / (vh.sqrt() + g["eps"]), alpha=-g["lr"])
                i += 1


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(122)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(1220 + rank)
    optimizer = MyAdam(model.parameters(), lr=5e-3)
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
    own = {"t": optimizer.t, "m": optimizer.m, "v": optimizer.v}
    zoolib.finish(args, losses, model=model, optimizer=optimizer, own=own)


if __name__ == "__main__":
    main()
