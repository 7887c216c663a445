"""WGAN: the critic's weights are clamped after its step, the generator learns every third time.

`p.data.clamp_` between steps changes weights outside any optimizer and leaves version counters as
they are; whether the generator steps depends on `enumerate`.
"""

import torch
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(17)
    generator = zoolib.spread(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 16)), args)
    critic = zoolib.spread(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 1)), args)
    torch.manual_seed(170 + rank)
    optimizer_G = torch.optim.RMSprop(generator.parameters(), lr=5e-3)
    optimizer_D = torch.optim.RMSprop(critic.parameters(), lr=5e-3)
    ks = keepstep.attach([generator, critic], [optimizer_G, optimizer_D])
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(96))
    n_critic, clip_value = 3, 0.05

    @ks.step
    def critic_step(real):
        optimizer_D.zero_grad()
        fake = generator(torch.randn(len(real), 8)).detach()
        loss_D = -critic(real).mean() + critic(fake).mean()
        loss_D.backward()
        optimizer_D.step()
        return loss_D.item()

    @ks.step
    def generator_step(count):
        optimizer_G.zero_grad()
        loss_G = -critic(generator(torch.randn(count, 8))).mean()
        loss_G.backward()
        optimizer_G.step()
        return loss_G.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (imgs, _) in enumerate(ks.batches(loader)):
            losses.append(critic_step(imgs))
            for p in critic.parameters():
                p.data.clamp_(-clip_value, clip_value)
            if i % n_critic == 0:
                losses.append(generator_step(len(imgs)))
                print(f"[Epoch {epoch}] [Batch {i}] [G loss: {losses[-1]:.4f}]")
    zoolib.finish(args, losses, generator=generator, critic=critic, g=optimizer_G, d=optimizer_D)


if __name__ == "__main__":
    main()
