"""The plainest loop: `for epoch in range(n)` and a running mean of the loss.

`range` begins at 0 in a replacement, and the mean is over everything since the beginning.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(118)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1180 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, running_loss, seen = [], 0.0, 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader), 0):
            loss = train_step(x, y)
            running_loss += loss * len(x)
            seen += len(x)
            losses.append(loss)
            if i % 4 == 3:
                print(f"[{epoch + 1}, {i + 1}] loss: {running_loss / seen:.3f}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer, running=running_loss / seen)


if __name__ == "__main__":
    main()
