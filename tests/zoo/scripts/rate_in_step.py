"""The step sets the learning rate and raises a counter before its update, and returns both.

A newcomer that makes the rest of a lost step must have them as they were in the fence: neither as
the step found them, nor as the next one does.
"""

import torch
import zoolib
from torch import nn

import keepstep


class Counter:
    def __init__(self):
        self.n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, s):
        self.n = s["n"]


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(57)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(570 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    counter = Counter()
    ks = keepstep.attach(model, optimizer)
    ks.register("counter", counter)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y, i):
        for g in optimizer.param_groups:
            g["lr"] = 5e-3 / (1 + i)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        counter.n += 1
        optimizer.step()
        return {"loss": loss.item(), "lr": optimizer.param_groups[0]["lr"], "n": counter.n}

    losses, lrs, ns, i = [], [], [], 0
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            found = train_step(x, y, i)
            losses.append(found["loss"])
            lrs.append(found["lr"])
            ns.append(found["n"])
            i += 1
    zoolib.finish(args, losses, model=model, optimizer=optimizer, lrs=lrs, ns=ns, n=counter.n)


if __name__ == "__main__":
    main()
