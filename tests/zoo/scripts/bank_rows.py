"""A memory bank whose rows the loop takes as views, and fills after the step.

`row = bank[i]` is no copy: what is written to it behind the step is in the bank. So is a column of
statistics of which the loop keeps two halves, and a numpy array over the memory of a tensor.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(41)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(410 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    bank = torch.zeros(8, 4)
    count = torch.zeros(8)
    counted = count.numpy()

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y) + 0.1 * bank.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, seen = [], 0
    average = torch.zeros(4)
    low, high = average[:2], average[2:]
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        average = average * 0.5
        low, high = average[:2], average[2:]
        for x, y in ks.batches(loader):
            row = bank[seen % 8]
            seen += 1
            loss = train_step(x, y)
            row.add_(loss + rank)
            low += loss
            high -= loss
            counted[seen % 8] += loss
            losses.append(loss + average.sum().item() + average[0].item() + count.sum().item())
    zoolib.finish(
        args, losses, model=model, optimizer=optimizer, script=[bank, average, low, high, count]
    )


if __name__ == "__main__":
    main()
