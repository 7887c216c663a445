"""Running means of gradients in a dict whose keys are parameters.

Filled before the first step, changed in place between steps, and read by the step.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(127)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1270 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    means = {p: torch.zeros_like(p) for p in model.parameters()}

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p, mean in means.items():
            p.grad.add_(mean, alpha=0.1)
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
            with torch.no_grad():
                for p, mean in means.items():
                    mean.lerp_(p, 0.1)
    kept = list(means.values())
    zoolib.finish(args, losses, model=model, optimizer=optimizer, means=kept)


if __name__ == "__main__":
    main()
