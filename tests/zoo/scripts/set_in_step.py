"""A set of numbers that a step changes, and whose order the step uses.

Hard samples are kept in a set; each step takes the first few of `list(hard)` again.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(522)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5220 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    x, y = zoolib.vectors().tensors
    loader, sampler = zoolib.sharded_loader(TensorDataset(torch.arange(128), x, y))
    hard = set(range(128))

    @ks.step
    def train_step(ids):
        again = list(hard)[:4]
        ids = torch.cat([ids, torch.tensor(again, dtype=torch.long)])
        each = nn.functional.cross_entropy(model(x[ids]), y[ids], reduction="none")
        for i, loss in zip(ids.tolist(), each.tolist()):
            if loss < 1.39:
                hard.discard(i)
            else:
                hard.add(i)
        for i in list(hard)[8:]:
            if i % 3:
                hard.discard(i)
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
        return each.mean().item()

    losses, orders = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for ids, _, _ in ks.batches(loader):
            losses.append(train_step(ids))
            orders.append(list(hard)[:4])
    zoolib.finish(args, losses, model=model, optimizer=optimizer, orders=orders)


if __name__ == "__main__":
    main()
