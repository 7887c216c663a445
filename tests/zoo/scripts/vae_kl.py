"""A VAE with KL annealing: the weight of the KL term grows with a counter of the model.

The counter is a Python attribute of the module that the step raises; the reparametrisation draws
in forward.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 16), nn.Linear(8, 16)
        self.steps = 0

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(z), mu, logvar

    def kl_weight(self, total=12):
        return min(1.0, self.steps / total)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(133)
    net = VAE()
    model = DistributedDataParallel(net)
    torch.manual_seed(1330 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x):
        recon, mu, logvar = model(x)
        bce = (recon - x).pow(2).sum(1).mean()
        kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        loss = bce + net.kl_weight() * kld
        net.steps += 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        train_loss = 0.0
        for x, _ in ks.batches(loader):
            loss = train_step(x)
            train_loss += loss
            losses.append(loss)
        print(f"====> Epoch: {epoch} Average loss: {train_loss / len(loader):.4f}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer, steps=net.steps,
                  train_loss=train_loss)  # fmt: skip


if __name__ == "__main__":
    main()
