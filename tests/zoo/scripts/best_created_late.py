"""The best losses of some steps, in an object that has no such list before the first of them.

Its load_state_dict takes only what is there, so it leaves out what a newcomer has not got yet.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Best:
    def __init__(self):
        self.updates = 0

    def update(self, loss):
        self.updates += 1
        self.losses = sorted([*getattr(self, "losses", []), loss])[:3]

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        for name, value in state.items():
            if hasattr(self, name):
                setattr(self, name, value)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(61)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    torch.manual_seed(610 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    best = Best()
    ks = keepstep.attach(model, optimizer, best=best)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if ks.committed_step % 4 == 3:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            best.update(mean.item())
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, best=best.state_dict())


if __name__ == "__main__":
    main()
