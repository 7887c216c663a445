"""Weights of losses that are learned, by homoscedastic uncertainty, and a margin with a state.

The loss is a module of its own: its parameters are the optimizer's, nobody attaches it. A
temperature is a plain tensor with an optimizer of its own.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Weighted(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(tasks))
        self.register_buffer("margin", torch.zeros(tasks))

    def forward(self, losses):
        losses = torch.stack(losses)
        if self.training:
            self.margin.lerp_(losses.detach(), 0.1)
        return (torch.exp(-self.log_vars) * (losses - 0.1 * self.margin) + self.log_vars).sum()


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(611)
    model = DistributedDataParallel(zoolib.mlp())
    criterion = Weighted(2)
    temperature = torch.ones(1, requires_grad=True)
    torch.manual_seed(6110 + rank)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=5e-3)
    cooling = torch.optim.Adam([temperature], lr=1e-2)
    ks = keepstep.attach(model, [optimizer, cooling])
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        out = model(x) / temperature
        loss = criterion([nn.functional.cross_entropy(out, y), out.square().mean()])
        optimizer.zero_grad()
        cooling.zero_grad()
        loss.backward()
        for p in (criterion.log_vars, temperature):
            dist.all_reduce(p.grad)
            p.grad.div_(world)
        optimizer.step()
        cooling.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(
        args,
        losses,
        model=model,
        optimizer=optimizer,
        cooling=cooling,
        criterion=criterion,
        temperature=temperature,
    )


if __name__ == "__main__":
    main()
