"""A prefetcher in the manner of Apex: it holds the next batch while the current one is used.

The wrapper asks the protected loop for batch k + 1 before step k runs, and normalises it on the
way, so the job is always one batch ahead of its steps.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class DataPrefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.mean, self.std = torch.tensor(0.1), torch.tensor(1.1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        self.next_input = self.next_input.sub(self.mean).div(self.std)

    def next(self):
        input, target = self.next_input, self.next_target
        if input is not None:
            self.preload()
        return input, target


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(125)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1250 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(input, target):
        loss = nn.functional.cross_entropy(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        prefetcher = DataPrefetcher(ks.batches(loader))
        input, target = prefetcher.next()
        i = 0
        while input is not None:
            i += 1
            losses.append(train_step(input, target))
            input, target = prefetcher.next()
    zoolib.finish(args, losses, model=model, optimizer=optimizer, last=i)


if __name__ == "__main__":
    main()
