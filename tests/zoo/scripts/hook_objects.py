"""Observers that only hooks know: a running range on activations, adaptive clipping on gradients.

`layer.register_forward_hook(Range())` and `p.register_hook(Clip())`: no name of the script leads to
these objects.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Range:
    def __init__(self, decay=0.9):
        self.decay, self.high = decay, None

    def __call__(self, module, inputs, output):
        if module.training:
            high = output.detach().abs().max().item()
            self.high = high if self.high is None else self.decay * self.high + 0.1 * high
        return output.clamp(-0.9 * self.high, 0.9 * self.high)


class Clip:
    def __init__(self):
        self.mean, self.count = 0.0, 0

    def __call__(self, grad):
        norm = grad.norm().item()
        self.count += 1
        self.mean += (norm - self.mean) / self.count
        return grad * min(1.0, self.mean / (norm + 1e-6))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(513)
    net = zoolib.mlp()
    for layer in net:
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(Range())
            layer.weight.register_hook(Clip())
    model = DistributedDataParallel(net)
    torch.manual_seed(5130 + rank)
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
