"""Gradient surgery: p.grad of each task by autograd.grad, projected in random order, reduced by
hand.

Uncertainty weights are parameters beside the model; GradNorm-like targets follow from first losses
kept in an attribute that is None at first.
"""

import random

import torch
import torch.distributed as dist
import zoolib
from torch import nn

import keepstep


class Weighting(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(n))
        self.initial = None

    def forward(self, losses):
        if self.initial is None:
            self.initial = [x.item() for x in losses]
        ratio = [x / i for x, i in zip(losses, self.initial)]
        return [(-s).exp() * r + s for s, r in zip(self.log_var, ratio)]


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(608)
    net, weighting = zoolib.mlp(out=8), Weighting(2)
    optimizer = torch.optim.Adam([*net.parameters(), *weighting.parameters()], lr=5e-3)
    ks = keepstep.attach({"net": net, "weighting": weighting}, optimizer)
    zoolib.seed_everything(6080 + rank)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    conflicts = {"count": 0}

    @ks.step
    def train_step(x, y):
        out = net(x)
        tasks = [
            nn.functional.cross_entropy(out[:, :4], y),
            (out[:, 4:] - x[:, :4]).square().mean(),
        ]
        params = [p for g in optimizer.param_groups for p in g["params"]]
        grads = []
        for loss in weighting(tasks):
            g = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
            g = torch.cat(
                [(torch.zeros_like(p) if d is None else d).flatten() for p, d in zip(params, g)]
            )
            dist.all_reduce(g)
            grads.append(g / world)
        projected = [g.clone() for g in grads]
        for g in projected:
            order = list(grads)
            random.shuffle(order)
            for other in order:
                dot = g @ other
                if dot < 0:
                    conflicts["count"] += 1
                    g -= dot * other / other.norm() ** 2
        total, at = sum(projected), 0
        dist.broadcast(total, 0)
        for p in params:
            p.grad = total[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
        return sum(tasks).item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(
        args,
        losses,
        net=net,
        weighting=weighting,
        optimizer=optimizer,
        conflicts=conflicts,
        initial=weighting.initial,
    )


if __name__ == "__main__":
    main()
