"""A stream in the manner of webdataset: shards in random order, a shuffle buffer, batches.

Each stage is a generator function with a `random.Random` in its closure; the buffer holds samples
that were read and not yet served.
"""

import random

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def shards(rank, world, rng):
    urls = [f"shard-{i:03d}" for i in range(8)]
    while True:
        rng.shuffle(urls)
        yield from urls[rank::world]


def samples(urls):
    for url in urls:
        g = torch.Generator().manual_seed(int(url[-3:]))
        for _ in range(24):
            x = torch.randn(16, generator=g)
            yield {"__url__": url, "x": x, "y": x[:4].argmax()}


def shuffled(source, size, rng):
    buffer = []
    for sample in source:
        buffer.append(sample)
        if len(buffer) >= size:
            yield buffer.pop(rng.randrange(len(buffer)))


def batched(source, size):
    batch = []
    for sample in source:
        batch.append(sample)
        if len(batch) == size:
            yield {k: torch.stack([s[k] for s in batch]) for k in ("x", "y")}
            batch = []


class WebLoader:
    def __init__(self, rank, world):
        self.shard_rng, self.rng = random.Random(0), random.Random(rank)
        self.rank, self.world = rank, world

    def __iter__(self):
        urls = shards(self.rank, self.world, self.shard_rng)
        return batched(shuffled(samples(urls), 20, self.rng), 8)


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(126)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1260 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)

    @ks.step
    def train_step(batch):
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for i, batch in enumerate(ks.batches(WebLoader(rank, world))):
        losses.append(train_step(batch))
        if i + 1 == 16:
            break
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
