"""Evolution strategies: weights are perturbed in place, rewards gathered, p.grad written by hand.

There is no backward; parameters change and change back (with rounding) before the fence.
"""

import numpy as np
import torch
import torch.distributed as dist
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(508)
    policy = zoolib.mlp(dropout=0.0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    ks = keepstep.attach(policy, optimizer)
    x, y = zoolib.vectors(64).tensors
    noise = np.random.RandomState(5080 + rank)
    sigma, baseline = 0.05, 0.0

    @torch.no_grad()
    def fitness():
        return -nn.functional.cross_entropy(policy(x), y).item()

    @ks.step
    @torch.no_grad()
    def generation():
        seeds, rewards = [], []
        for _ in range(3):
            seed = int(noise.randint(2**31 - 1))
            g = torch.Generator().manual_seed(seed)
            eps = [torch.randn(p.shape, generator=g) for p in policy.parameters()]
            for p, e in zip(policy.parameters(), eps):
                p.add_(sigma * e)
            plus = fitness()
            for p, e in zip(policy.parameters(), eps):
                p.sub_(2 * sigma * e)
            rewards.append(plus - fitness())
            for p, e in zip(policy.parameters(), eps):
                p.add_(sigma * e)
            seeds.append(seed)
        for p in policy.parameters():
            dist.broadcast(p, 0)
        everyone = [None] * world
        dist.all_gather_object(everyone, (seeds, rewards))
        for p in policy.parameters():
            p.grad = torch.zeros_like(p)
        for seeds, rewards in everyone:
            for seed, reward in zip(seeds, rewards):
                g = torch.Generator().manual_seed(seed)
                for p in policy.parameters():
                    p.grad.sub_(reward * torch.randn(p.shape, generator=g))
        optimizer.step()
        return fitness()

    losses = []
    for _ in range(15):
        losses.append(generation())
        baseline = 0.9 * baseline + 0.1 * losses[-1]
        sigma *= 0.98 if losses[-1] > baseline else 1.01
    zoolib.finish(args, losses, model=policy, optimizer=optimizer, baseline=baseline, sigma=sigma)


if __name__ == "__main__":
    main()
