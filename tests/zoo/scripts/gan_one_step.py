"""A GAN whose discriminator and generator are both updated in one protected step.

The generator's forward and backward pass come after the discriminator's update: collectives after
the first update of a step, which cannot be repeated.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(7)
    G = DistributedDataParallel(zoolib.mlp(8, 16, 16))
    D = DistributedDataParallel(zoolib.mlp(16, 16, 1))
    torch.manual_seed(rank)
    opt_g = torch.optim.RMSprop(G.parameters(), lr=1e-3)
    opt_d = torch.optim.RMSprop(D.parameters(), lr=1e-3)
    ks = keepstep.attach([G, D], [opt_g, opt_d])
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(real):
        z = torch.randn(len(real), 8)
        opt_d.zero_grad()
        loss_d = nn.functional.softplus(-D(real)).mean()
        loss_d = loss_d + nn.functional.softplus(D(G(z).detach())).mean()
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = nn.functional.softplus(-D(G(z))).mean()
        loss_g.backward()
        opt_g.step()
        return loss_d.item(), loss_g.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for real, _ in ks.batches(loader):
            loss_d, loss_g = train_step(real)
            losses.append(loss_d + loss_g)
    zoolib.finish(args, losses, G=G, D=D, opt_g=opt_g, opt_d=opt_d)


if __name__ == "__main__":
    main()
