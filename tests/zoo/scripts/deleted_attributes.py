"""State that is deleted: `del self.pending`, a warm-up generator that has come to its end.

What is not there any more is state as well: `hasattr(self, "pending")` says what the next round
does.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Trainer:
    def __init__(self, optimizer):
        self.optimizer, self.warm = optimizer, True
        self.pending = 3
        self.factors = self.warm_up()

    def warm_up(self):
        for i in range(4):
            yield 0.2 * (i + 1)

    def before(self):
        factor = next(self.factors, None)
        for g in self.optimizer.param_groups:
            g["lr"] = 5e-3 * (1.0 if factor is None else factor)
        return factor

    def after(self, loss):
        if hasattr(self, "pending"):
            self.pending -= 1
            if self.pending == 0:
                del self.pending

    def weight(self):
        return 0.5 if hasattr(self, "pending") else 1.0


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(534)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5340 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    trainer = Trainer(optimizer)

    @ks.step
    def train_step(x, y, weight):
        loss = weight * nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, seen = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            seen.append((trainer.before(), trainer.weight()))
            losses.append(train_step(x, y, trainer.weight()))
            trainer.after(losses[-1])
    zoolib.finish(args, losses, model=model, optimizer=optimizer, seen=seen)


if __name__ == "__main__":
    main()
