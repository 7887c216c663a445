"""A step that looks at weights behind its update, by views and lists that it made before.

What is a view of a weight before the update is one behind it: its value is the new one. A row of
a bank that the step has taken before the update, and fills behind it, is part of the bank.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Watched(nn.Sequential):
    def forward(self, x):
        output = super().forward(x)
        self.spread = output.std()  # a loss that a layer leaves for the step
        return output


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(42)
    model = DistributedDataParallel(Watched(*zoolib.mlp()))
    torch.manual_seed(420 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    def look(module, args, output):
        first_layer["mean"] = output.mean()

    bank, seen, first_layer = torch.zeros(8, 4), [], {}
    model.module[0].register_forward_hook(look)
    losses = []

    @ks.step
    def train_step(x, y):
        weight = model.module[0].weight.data
        first = weight[0]
        slot = bank[len(losses) % 8]
        layers = [p.data for p in model.parameters()]
        before = weight.clone()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norm = sum(layer.norm().item() for layer in layers)
        moved = (weight - before).norm().item()
        seen.append(model.module.spread.item() + first_layer["mean"].item())
        slot.copy_(before[0, :4])
        return loss.item(), norm, moved, first.sum().item()

    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.extend(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, bank=bank, seen=seen)


if __name__ == "__main__":
    main()
