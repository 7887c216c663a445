"""A look-ahead around an optimizer of the script's own; both keep their state in attributes.

Slow weights in a list, momentum in a dict by parameter that fills by and by, counters, and a
history that only every third update appends to.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner, k=3, alpha=0.5):
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": 1.0})
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]
        self.trace = {"norms": [], "best": None}

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % self.k == 0:
            params = [p for g in self.inner.param_groups for p in g["params"]]
            for p, slow in zip(params, self.slow):
                slow.add_(p - slow, alpha=self.alpha)
                p.copy_(slow)
            self.trace["norms"].append(float(sum(p.norm() for p in params)))


class Inner(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.t = 0
        self.u = {}

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            self.u[p] = self.u.get(p, torch.zeros_like(p)) * 0.9 + p.grad
            p.add_(self.u[p], alpha=-self.param_groups[0]["lr"] / (1 + 0.01 * self.t))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(123)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1230 + rank)
    inner = Inner(model.parameters(), lr=5e-2)
    optimizer = Lookahead(inner)
    ks = keepstep.attach(model, [optimizer, inner])
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
    own = {
        "u": list(inner.u.values()),
        "t": inner.t,
        "slow": optimizer.slow,
        "trace": optimizer.trace,
    }
    zoolib.finish(args, losses, model=model, optimizer=inner, own=own)


if __name__ == "__main__":
    main()
