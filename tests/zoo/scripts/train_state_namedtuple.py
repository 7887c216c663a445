"""JAX style: `state = train_step(state, batch)`, a NamedTuple that the step returns anew.

It holds the average of the weights as tensors, a step count, and a frozen dataclass of settings;
the step is a callable object with a partial around it.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float
    decay: float = 0.9
    phase: str = "warm"


class TrainState(NamedTuple):
    step: int
    ema: tuple
    settings: Settings
    best: float


class Step:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.seen = model, optimizer, 0

    def __call__(self, weight, state, batch):
        x, y = batch
        out = self.model(x)
        loss = weight * nn.functional.cross_entropy(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        for g in self.optimizer.param_groups:
            g["lr"] = state.settings.lr
        self.optimizer.step()
        self.seen += len(x)
        d = state.settings.decay
        ema = tuple(e.lerp(p.detach(), 1 - d) for e, p in zip(state.ema, self.model.parameters()))
        settings = state.settings
        if state.step % 4 == 3:
            settings = dataclasses.replace(settings, lr=settings.lr * 0.8, phase="main")
        state = TrainState(state.step + 1, ema, settings, min(state.best, loss.item()))
        return loss.detach(), (out.argmax(1) == y).sum(), state


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(521)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5210 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    step = Step(model, optimizer)
    train_step = functools.partial(ks.step(step), 0.9)
    state = TrainState(
        0, tuple(p.detach().clone() for p in model.parameters()), Settings(5e-3), 1e9
    )

    losses, right = [], 0
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for batch in ks.batches(loader):
            loss, n, state = train_step(state, batch)
            right += n.item()
            losses.append(loss.item())
    zoolib.finish(
        args,
        losses,
        model=model,
        optimizer=optimizer,
        ema=state.ema,
        seen=step.seen,
        own=[state.step, state.best, right, str(state.settings)],
    )


if __name__ == "__main__":
    main()
