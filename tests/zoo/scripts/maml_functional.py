"""MAML: inner steps by functional_call and autograd.grad, gradients averaged by hand, no DDP.

Tasks are drawn by a sampler object with a RandomState; inner learning rates are parameters beside
the model.
"""

import numpy as np
import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.func import functional_call

import keepstep


class Tasks:
    def __init__(self, seed):
        self.rng, self.drawn = np.random.RandomState(seed), 0

    def sample(self):
        self.drawn += 1
        amplitude, phase = self.rng.uniform(0.1, 5), self.rng.uniform(0, np.pi)
        x = self.rng.uniform(-5, 5, (16, 1))
        x, y = (torch.tensor(v, dtype=torch.float32) for v in (x, amplitude * np.sin(x - phase)))
        return x[:8], y[:8], x[8:], y[8:]


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(603)
    net = zoolib.mlp(1, 24, 1, dropout=0.0)
    rates = nn.ParameterDict(
        {n.replace(".", "_"): torch.full((1,), 0.02) for n, _ in net.named_parameters()}
    )
    optimizer = torch.optim.Adam([*net.parameters(), *rates.parameters()], lr=1e-2)
    ks = keepstep.attach({"net": net, "rates": rates}, optimizer)
    tasks = Tasks(6030 + rank)

    @ks.step
    def meta_step(batch):
        total = 0.0
        for xs, ys, xq, yq in batch:
            weights = dict(net.named_parameters())
            for _ in range(2):
                loss = nn.functional.mse_loss(functional_call(net, weights, (xs,)), ys)
                grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {
                    n: w - rates[n.replace(".", "_")] * g
                    for (n, w), g in zip(weights.items(), grads)
                }
            total = total + nn.functional.mse_loss(functional_call(net, weights, (xq,)), yq)
        optimizer.zero_grad()
        (total / len(batch)).backward()
        for group in optimizer.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= world
        optimizer.step()
        return total.item()

    losses = []
    for _ in range(15):
        losses.append(meta_step([tasks.sample() for _ in range(3)]))
    zoolib.finish(args, losses, net=net, rates=rates, optimizer=optimizer, drawn=tasks.drawn)


if __name__ == "__main__":
    main()
