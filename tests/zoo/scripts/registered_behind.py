"""A rank's own record of losses, registered with per_rank=True, that each step adds to behind its
update and that the next one reads.

Keepstep does not look into an array of objects, so the registration is all there is.
"""

import numpy
import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(33)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(330 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    record = numpy.zeros(8, dtype=object)

    def load(values):
        record[:] = values

    ks = keepstep.attach(model, optimizer)
    ks.register("record", record.tolist, load, per_rank=True)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        usual = sum(record) / len(record)
        loss = nn.functional.cross_entropy(model(x), y) * (1 + 0.1 * usual)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record[:-1] = record[1:]
        record[-1] = loss.item()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, record=record.tolist())


if __name__ == "__main__":
    main()
