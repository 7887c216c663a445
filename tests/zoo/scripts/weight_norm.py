"""Weight normalisation with the old hook-based function, and gains that are reset by hand.

The normalised weight is a plain attribute that a forward hook computes; every fourth step the
script rescales the gains outside the optimizer.
"""

import warnings

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

warnings.filterwarnings("ignore", category=FutureWarning)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(92)
    net = nn.Sequential(
        nn.utils.weight_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Dropout(0.1),
        nn.utils.weight_norm(nn.Linear(32, 4)),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    torch.manual_seed(920 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
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
        for i, (x, y) in enumerate(ks.batches(loader)):
            losses.append(train_step(x, y))
            if i % 4 == 3:
                net[0].weight_g.data.clamp_(max=0.6)
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
