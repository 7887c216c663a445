"""Hard example mining: samples are drawn by weights that follow their own losses.

The weights are a tensor inside WeightedRandomSampler that the script changes after every step, and
the draws come from the sampler's generator.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import keepstep


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(139)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1390 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    x, y = (t[rank::world] for t in zoolib.vectors().tensors)
    data = TensorDataset(torch.arange(len(x)), x, y)
    g = torch.Generator().manual_seed(rank)
    sampler = WeightedRandomSampler(torch.ones(len(x)), 40, replacement=True, generator=g)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    @ks.step
    def train_step(x, y):
        each = nn.functional.cross_entropy(model(x), y, reduction="none")
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
        return each.detach()

    losses = []
    for _ in ks.epochs(3):
        for index, x, y in ks.batches(loader):
            each = train_step(x, y)
            sampler.weights[index] = 0.5 * sampler.weights[index] + 0.5 * each.double()
            losses.append(each.mean().item())
    zoolib.finish(args, losses, model=model, optimizer=optimizer, weights=sampler.weights,
                  generator=g.get_state())  # fmt: skip


if __name__ == "__main__":
    main()
