"""Spectral normalisation by parametrization: power iteration in every forward pass.

The vectors of the power iteration are buffers inside a parametrization and change with each pass,
also those that are repeated.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(91)
    net = nn.Sequential(
        spectral_norm(nn.Linear(16, 32)), nn.LeakyReLU(), nn.Dropout(0.1),
        spectral_norm(nn.Linear(32, 32)), nn.LeakyReLU(), nn.Linear(32, 4),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    torch.manual_seed(910 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
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
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
