"""Early stopping with patience, by the loss of a validation set.

The stopper counts in its own attributes; when it says stop, all ranks must leave the loop.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.counter, self.best, self.early_stop = patience, 0, None, False

    def __call__(self, loss):
        if self.best is None or loss < self.best - 0.05:
            self.best, self.counter = loss, 0
        else:
            self.counter += 1
            self.early_stop = self.counter >= self.patience


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(106)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1060 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(64))
    held_out = zoolib.vectors(32).tensors

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @ks.section
    def validate():
        model.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model.module(held_out[0]), held_out[1])
        dist.all_reduce(loss)
        model.train()
        return loss.item()

    losses, stopper = [], EarlyStopping(patience=4)
    for epoch in ks.epochs(10):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
        stopper(validate())
        if stopper.early_stop:
            print("Early stopping")
            break
    zoolib.finish(args, losses, model=model, optimizer=optimizer, stopper=vars(stopper))


if __name__ == "__main__":
    main()
