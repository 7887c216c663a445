"""An optimizer that estimates a number from the gradients, in its groups, as Prodigy does.

The step returns that number. A newcomer that makes the rest of a lost step has no gradients.
"""

import torch
import zoolib
from torch import nn

import keepstep


class Adaptive(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            found = [p.grad.norm().item() for p in group["params"] if p.grad is not None]
            if found:
                group["d"] = max(group.get("d", 0.0) * 0.9, sum(found))
        return super().step(closure)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(57)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(570 + rank)
    optimizer = Adaptive(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item(), optimizer.param_groups[0]["d"]

    losses, ds = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            loss, d = train_step(x, y)
            losses.append(loss)
            ds.append(d)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, ds=ds)


if __name__ == "__main__":
    main()
