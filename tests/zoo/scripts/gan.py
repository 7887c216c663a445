"""A DCGAN: two models, two optimizers, two protected steps per batch.

Noise comes from the global stream between the steps, the generator's output is made in one step
and used detached in the other, and both steps leave gradients in the other's model.
"""

import torch
import zoolib
from torch import nn

import keepstep

latent = 8


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(7)
    netG = zoolib.spread(
        nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh()), args
    )
    netD = zoolib.spread(
        nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)), args
    )
    zoolib.seed_everything(70 + rank)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    ks = keepstep.attach({"G": netG, "D": netD}, {"G": optimizerG, "D": optimizerD})
    criterion = nn.BCEWithLogitsLoss()
    dataloader, sampler = zoolib.sharded_loader(zoolib.vectors(64))

    @ks.step
    def discriminator_step(real, noise):
        netD.zero_grad()
        label = torch.full((len(real), 1), 0.9)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), torch.zeros_like(label))
        errD_fake.backward()
        optimizerD.step()
        return (errD_real + errD_fake).item()

    @ks.step
    def generator_step(noise):
        netG.zero_grad()
        output = netD(netG(noise))
        errG = criterion(output, torch.ones_like(output))
        errG.backward()
        optimizerG.step()
        return errG.item()

    losses, iters = [], 0
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (real, _) in enumerate(ks.batches(dataloader)):
            noise = torch.randn(len(real), latent)
            losses.append(discriminator_step(real, noise))
            losses.append(generator_step(noise))
            if i % 2 == 0 and rank == 0:
                print(f"[{epoch}][{i}] Loss_D {losses[-2]:.4f} Loss_G {losses[-1]:.4f}")
            iters += 1
    zoolib.finish(args, losses, G=netG, D=netD, optimizerG=optimizerG, optimizerD=optimizerD,
                  iters=iters)  # fmt: skip


if __name__ == "__main__":
    main()
