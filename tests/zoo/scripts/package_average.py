"""An average of the weights by somebody else's package, which nobody registers.

Its shadows and its count of updates, on which the decay depends, are attributes of a library's
object. A step looks at the average, and pulls the weights towards it.
"""

import sys
from pathlib import Path

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

sys.path.append(str(Path(__file__).parent / "site-packages"))


def main():
    from weight_averages import ExponentialAverage

    args, rank, _ = zoolib.start()
    zoolib.seed_everything(121)
    net = zoolib.mlp()
    model = DistributedDataParallel(net)
    torch.manual_seed(1210 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    average = ExponentialAverage(net.parameters(), 0.95)

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        for p, shadow in zip(net.parameters(), average.shadow):
            loss = loss + 0.01 * (p - shadow).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
            average.update(net.parameters())
    kept = {"shadow": average.shadow, "updates": average.updates}
    zoolib.finish(args, losses, model=model, optimizer=optimizer, average=kept)


if __name__ == "__main__":
    main()
