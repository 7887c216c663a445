"""A Trainer class whose step hands loss and metrics to a helper that makes the update and logs.

What the helper still has to do behind the update hangs on its own local variables, a lambda's cell,
an enumeration, and a value that waits on Python's stack while the optimizer runs.
"""

import enum
from collections import defaultdict

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Phase(enum.Enum):
    WARM = "warm"
    STEADY = "steady"


class Trainer:
    def __init__(self, rank):
        self.model = DistributedDataParallel(zoolib.mlp())
        torch.manual_seed(410 + rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.ks = keepstep.attach(self.model, self.optimizer)
        self.train_step = self.ks.step(self.train_step)
        self.log, self.norms, self.temperature = [], [], 1.0

    def update(self, loss, correct):
        self.optimizer.zero_grad()
        loss.backward()
        phase = Phase.WARM if loss > 1.3 else Phase.STEADY
        note = lambda scale: self.log.append(loss.item() * scale)  # noqa: E731
        self.norms.append((correct.float().mean().item(), self.optimizer.step()))
        note(0.5)
        if phase is Phase.WARM:
            self.temperature *= 1 + 0.01 * correct.float().mean().item()
        return {"phase": phase.value, "right": int(correct.sum())}

    def train_step(self, x, y):
        logits = self.model(x) * self.temperature
        loss = nn.functional.cross_entropy(logits, y)
        found = self.update(loss, logits.argmax(1) == y)
        metrics = defaultdict(float, loss=loss.item())
        metrics["right"] += found["right"]
        return metrics


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(41)
    trainer = Trainer(rank)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    losses, right = [], 0
    for epoch in trainer.ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in trainer.ks.batches(loader):
            metrics = trainer.train_step(x, y)
            losses.append(metrics["loss"])
            right += metrics["right"]
    script = [right, trainer.log, trainer.norms, trainer.temperature]
    zoolib.finish(args, losses, model=trainer.model, optimizer=trainer.optimizer, script=script)


if __name__ == "__main__":
    main()
