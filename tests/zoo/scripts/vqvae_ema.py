"""VQ-VAE: a codebook averaged in forward over all ranks, dead codes revived at random.

Counts and sums are buffers that change in forward, by collectives; revival draws from torch.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Quantizer(nn.Module):
    def __init__(self, n=12, dim=8, decay=0.9):
        super().__init__()
        self.n, self.decay = n, decay
        embed = torch.randn(n, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(n))
        self.register_buffer("embed_avg", embed.clone())
        self.steps = 0

    def forward(self, z):
        found = torch.cdist(z, self.embed).argmin(1)
        onehot = nn.functional.one_hot(found, self.n).float()
        if self.training:
            self.steps += 1
            count, total = onehot.sum(0), onehot.T @ z.detach()
            dist.all_reduce(count)
            dist.all_reduce(total)
            self.cluster_size.data.mul_(self.decay).add_(count, alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(total, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            size = (self.cluster_size + 1e-5) / (n + self.n * 1e-5) * n
            self.embed.data.copy_(self.embed_avg / size[:, None])
            if self.steps % 4 == 0:
                dead = self.cluster_size < 0.5
                new = z.detach()[torch.randint(len(z), (self.n,))]
                dist.broadcast(new, 0)
                self.embed.data[dead] = new[dead]
                self.embed_avg.data[dead] = new[dead]
                self.cluster_size.data[dead] = 1.0
        q = self.embed[found]
        return z + (q - z).detach(), (q.detach() - z).square().mean()


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantizer = nn.Linear(16, 8), Quantizer()
        self.decoder = nn.Linear(8, 16)

    def forward(self, x):
        q, commit = self.quantizer(self.encoder(x))
        return self.decoder(q), commit


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(602)
    model = DistributedDataParallel(VQVAE(), broadcast_buffers=False)
    torch.manual_seed(6020 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x):
        out, commit = model(x)
        loss = (out - x).square().mean() + 0.25 * commit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, _ in ks.batches(loader):
            losses.append(train_step(x))
    zoolib.finish(
        args, losses, model=model, optimizer=optimizer, steps=model.module.quantizer.steps
    )


if __name__ == "__main__":
    main()
