"""A hook that disturbs activations is registered in the second epoch.

A replacement that comes later has the model without it.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def disturb(module, inputs, output):
    return output + 0.1 * torch.randn_like(output)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(126)
    net = zoolib.mlp()
    model = DistributedDataParallel(net)
    torch.manual_seed(1260 + rank)
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
    for epoch in ks.epochs(4):
        sampler.set_epoch(epoch)
        if epoch == 1:
            net[0].register_forward_hook(disturb)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
