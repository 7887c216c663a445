"""`meters = (AverageMeter("loss"), AverageMeter("acc"))`: what changes is inside a tuple of main().

The tuple itself is never bound anew; no other name leads to the objects and lists in it.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(541)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5410 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    meters = (AverageMeter("loss"), AverageMeter("accuracy"))
    logs = ([], {})

    @ks.step
    def train_step(x, y, weight):
        out = model(x)
        loss = weight * nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item(), (out.argmax(1) == y).float().mean().item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            loss, accuracy = train_step(x, y, 1 / (1 + meters[0].avg))
            losses.append(loss)
            meters[0].update(loss, len(x))
            meters[1].update(accuracy, len(x))
            logs[0].append(meters[0].avg)
            logs[1][epoch, i] = meters[1].avg
    zoolib.finish(args, losses, model=model, optimizer=optimizer, logs=logs,
                  meters=[vars(m) for m in meters])  # fmt: skip


if __name__ == "__main__":
    main()
