"""An average of the weights in a copy of a larger model, by `p.data.mul_`, from the second epoch.

No version counter sees it, and the model is too large to be read at every step.
"""

import copy

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


@torch.no_grad()
def follow(ema, net):
    for mine, theirs in zip(ema.parameters(), net.parameters(), strict=True):
        mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(53)
    net = nn.Sequential(
        nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 4)
    )
    model = DistributedDataParallel(net)
    torch.manual_seed(530 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    ema = copy.deepcopy(net).requires_grad_(False)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
            if epoch > 0:
                follow(ema, net)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, ema=ema.state_dict())


if __name__ == "__main__":
    main()
