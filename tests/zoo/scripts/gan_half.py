"""A GAN whose generator has a protected step and whose discriminator has none.

Forward, backward and update of the discriminator stand in the loop itself: what a newcomer computes
there alone is not what all ranks have computed together.
"""

import torch
import zoolib
from torch import nn

import keepstep

latent = 8


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(7)
    netG = zoolib.spread(nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 16)), args)
    netD = zoolib.spread(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)), args)
    zoolib.seed_everything(70 + rank)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3)
    ks = keepstep.attach({"G": netG, "D": netD}, {"G": optimizerG, "D": optimizerD})
    criterion = nn.BCEWithLogitsLoss()
    dataloader, sampler = zoolib.sharded_loader(zoolib.vectors(64))

    @ks.step
    def generator_step(noise):
        netG.zero_grad()
        output = netD(netG(noise))
        errG = criterion(output, torch.ones_like(output))
        errG.backward()
        optimizerG.step()
        return errG.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for real, _ in ks.batches(dataloader):
            noise = torch.randn(len(real), latent)
            netD.zero_grad()
            label = torch.full((len(real), 1), 0.9)
            errD = criterion(netD(real), label)
            errD += criterion(netD(netG(noise).detach()), torch.zeros_like(label))
            errD.backward()
            optimizerD.step()
            losses.append(errD.item())
            losses.append(generator_step(noise))
    zoolib.finish(args, losses, G=netG, D=netD, optimizerG=optimizerG, optimizerD=optimizerD)


if __name__ == "__main__":
    main()
