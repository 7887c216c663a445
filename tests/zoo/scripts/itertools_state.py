"""Round robin over tasks with `itertools.cycle`, and a step counter that is an `itertools.count`.

Both are iterators whose place nobody can read from outside.
"""

import itertools

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = zoolib.mlp(out=16)
        self.heads = nn.ModuleDict({t: nn.Linear(16, 4) for t in ("cls", "reg", "rank")})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(503)
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    torch.manual_seed(5030 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    tasks, global_step = itertools.cycle(["cls", "reg", "rank"]), itertools.count(1)

    @ks.step
    def train_step(x, y, task, n):
        out = model(x, task)
        square = task == "reg"
        loss = out.square().mean() if square else nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        for g in optimizer.param_groups:
            g["lr"] = 5e-3 / n**0.5
        optimizer.step()
        return loss.item()

    losses, seen = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            task, n = next(tasks), next(global_step)
            seen.append((task, n))
            losses.append(train_step(x, y, task, n))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, seen=seen, n=next(global_step))


if __name__ == "__main__":
    main()
