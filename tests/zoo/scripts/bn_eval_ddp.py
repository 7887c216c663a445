"""BatchNorm with DDP's defaults, evaluated through the DDP module every few steps.

A forward pass of the DDP module in a section broadcasts buffers as in training; the running
statistics of the ranks differ until then.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(86)
    net = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32),
        nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    torch.manual_seed(860 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    held_out, _ = zoolib.sharded_loader(zoolib.vectors(32))

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
        correct = torch.zeros(())
        with torch.no_grad():
            for x, y in held_out:
                correct += (model(x).argmax(1) == y).sum()
        dist.all_reduce(correct)
        model.train()
        return correct.item()

    losses, scores = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            losses.append(train_step(x, y))
            if i % 3 == 2:
                scores.append(evaluate())
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scores=scores)


if __name__ == "__main__":
    main()
