"""A schedule-free optimizer whose `eval()` and `train()` are called inside the section.

They move the weights through `p.data`, which counts no version, and back with rounding. A rank that
is lost in between leaves the others with weights for an evaluation, and with the flag in
param_groups that says so.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn

import keepstep


class SGDScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": True})

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], 1 - 1 / group["momentum"])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], 1 - group["momentum"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            ckp1, lr = 1 / group["k"], group["lr"]
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.detach().clone()
                p.data.lerp_(state["z"], ckp1)
                p.data.add_(p.grad, alpha=lr * (group["momentum"] * (1 - ckp1) - 1))
                state["z"].sub_(p.grad, alpha=lr)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(137)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(1370 + rank)
    optimizer = SGDScheduleFree(model.parameters())
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

    @ks.section
    def evaluate():
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(held_out[0]), held_out[1])
        dist.all_reduce(loss)
        model.train()
        optimizer.train()
        return loss.item()

    losses, scores = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            losses.append(train_step(x, y))
            if i % 2:
                scores.append(evaluate())
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scores=scores)


if __name__ == "__main__":
    main()
