"""Data pruning: the script gives its Subset other indices, its sampler other weights, its dataset
other labels.

They do so by assignment to attributes of torch's own objects.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

import keepstep


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(516)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5160 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    x, y = (t[rank::world] for t in zoolib.vectors(96).tensors)
    data = TensorDataset(torch.arange(len(x)), x, y)
    easy = Subset(data, list(range(32)))
    sampler = WeightedRandomSampler(
        torch.ones(32), 32, generator=torch.Generator().manual_seed(rank)
    )
    loader = DataLoader(easy, 8, sampler=sampler)
    table = torch.zeros(len(x))

    @ks.step
    def train_step(x, y):
        each = nn.functional.cross_entropy(model(x), y, reduction="none")
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
        return each.detach()

    losses = []
    for epoch in ks.epochs(4):
        for index, xb, yb in ks.batches(loader):
            each = train_step(xb, yb)
            table[index] = 0.5 * table[index] + 0.5 * each
            losses.append(each.mean().item())
        easy.indices = table.argsort(descending=epoch % 2 == 0)[:32].tolist()
        sampler.weights = 0.1 + table[easy.indices].double()
        if epoch == 1:
            with torch.no_grad():
                found = model.module(x).softmax(1).max(1)
            sure = torch.where(found.values > 0.4, found.indices, y)
            data.tensors = (data.tensors[0], x, sure)
    zoolib.finish(
        args,
        losses,
        model=model,
        optimizer=optimizer,
        table=table,
        indices=easy.indices,
        weights=sampler.weights,
        labels=data.tensors[2],
    )


if __name__ == "__main__":
    main()
