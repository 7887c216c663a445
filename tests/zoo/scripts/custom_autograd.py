"""A custom autograd function with buffers: gradients are recorded in running statistics.

The backward pass changes a buffer of the module, so statistics exist that forward passes alone do
not give.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, running):
        ctx.running = running
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.running.mul_(0.9).add_(0.1 * grad.detach().abs().mean(0))
        return grad / (1 + ctx.running), None


class GradientNormaliser(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("running", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        return ScaleGradient.apply(x, self.running)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(121)
    net = nn.Sequential(
        nn.Linear(16, 32), GradientNormaliser(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
    )
    model = DistributedDataParallel(net)
    torch.manual_seed(1210 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
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
