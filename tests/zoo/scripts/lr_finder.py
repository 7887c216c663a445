"""A learning rate finder: a range test over a few steps, then everything is put back and trained.

The test keeps copies of model and optimizer, smooths the losses in a list, chooses a learning rate
from it and loads the copies again, all between steps.
"""

import copy

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class LRFinder:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        self.history = {"lr": [], "loss": []}

    def set_lr(self, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def record(self, lr, loss):
        if self.history["loss"]:
            loss = 0.3 * loss + 0.7 * self.history["loss"][-1]
        self.history["lr"].append(lr)
        self.history["loss"].append(loss)

    def suggestion(self):
        slopes = torch.tensor(self.history["loss"]).diff()
        return self.history["lr"][int(slopes.argmin())]

    def reset(self):
        self.model.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(self.saved[1])


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(124)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1240 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(96))

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        shared = loss.detach().clone()
        dist.all_reduce(shared)
        optimizer.step()
        return loss.item(), shared.item() / world

    finder, losses = LRFinder(model, optimizer), []
    for i, (x, y) in enumerate(ks.batches(loader)):
        lr = 1e-3 * 10 ** (i / 2)
        finder.set_lr(lr)
        loss, shared = train_step(x, y)
        finder.record(lr, shared)
        losses.append(loss)
    best_lr = finder.suggestion()
    finder.reset()
    finder.set_lr(best_lr)
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y)[0])
    zoolib.finish(args, losses, model=model, optimizer=optimizer, history=finder.history)


if __name__ == "__main__":
    main()
