"""Batches of samples of similar length from a batch_sampler with a generator of its own.

The generator is inside the batch sampler, where `loader.generator` does not show it, and goes on
from epoch to epoch.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import keepstep


class BucketBatchSampler:
    def __init__(self, lengths, batch_size, seed):
        self.lengths, self.batch_size = lengths, batch_size
        self.rng = torch.Generator().manual_seed(seed)

    def __iter__(self):
        noise = torch.rand(len(self.lengths), generator=self.rng)
        order = torch.argsort(self.lengths + noise)
        batches = order.split(self.batch_size)
        for i in torch.randperm(len(batches), generator=self.rng).tolist():
            yield batches[i].tolist()

    def __len__(self):
        return len(self.lengths) // self.batch_size


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(76)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(760 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    data = zoolib.vectors(64)
    lengths = torch.arange(64) // 4
    batch_sampler = BucketBatchSampler(lengths, 8, seed=rank)
    loader = DataLoader(data, batch_sampler=batch_sampler)

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for _ in ks.epochs(2):
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer,
                  generator=batch_sampler.rng.get_state())  # fmt: skip


if __name__ == "__main__":
    main()
