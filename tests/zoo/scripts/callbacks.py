"""A Trainer with callbacks, a history dict, a dataclass config, and an evaluation that reseeds.

Callbacks are objects in a list with `on_step_end`; the evaluation calls torch.manual_seed(0) and
leaves it so; results of steps are dataclasses; the best weights are reloaded when the loss jumps.
"""

import copy
import dataclasses
import random
from types import SimpleNamespace

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


@dataclasses.dataclass
class Config:
    lr: float = 5e-2
    warmup: int = 4
    patience: int = 1
    tags: list = dataclasses.field(default_factory=lambda: ["base"])


class LRCallback:
    def __init__(self):
        self.history = []

    def on_step_end(self, trainer, loss):
        lr = trainer.config.lr * min(1.0, (trainer.global_step + 1) / trainer.config.warmup)
        for g in trainer.optimizer.param_groups:
            g["lr"] = lr * trainer.state.factor
        self.history.append(lr)


class Rollback:
    def __init__(self):
        self.best, self.weights, self.bad = float("inf"), None, 0

    def on_eval_end(self, trainer, score):
        if score < self.best:
            self.best = score
            self.weights = copy.deepcopy(trainer.model.module.state_dict())
            self.optimizer = copy.deepcopy(trainer.optimizer.state_dict())
            return
        self.bad += 1
        if self.bad > trainer.config.patience:
            trainer.model.module.load_state_dict(self.weights)
            trainer.optimizer.load_state_dict(self.optimizer)
            trainer.state.factor *= 0.5
            trainer.config.tags.append(f"rollback@{trainer.global_step}")
            self.bad = 0


class Trainer:
    def __init__(self, config, rank):
        self.config, self.global_step = config, 0
        self.model = DistributedDataParallel(zoolib.mlp())
        torch.manual_seed(6070 + rank)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.lr, momentum=0.95)
        self.ks = keepstep.attach(self.model, self.optimizer)
        self.callbacks = [LRCallback(), Rollback()]
        self.history = {"loss": [], "eval": []}
        self.state = SimpleNamespace(factor=1.0, epoch=0, drawn=[])
        self.step, self.evaluate = self.ks.step(self._step), self.ks.section(self._evaluate)

    def _step(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _evaluate(self, x, y):
        torch.manual_seed(0)
        noisy = x + 0.1 * torch.randn_like(x)
        with torch.no_grad():
            loss = nn.functional.cross_entropy(self.model.module.eval()(noisy), y)
        self.model.train()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def call(self, name, *args):
        for callback in self.callbacks:
            hook = getattr(callback, name, None)
            if hook is not None:
                hook(self, *args)

    def fit(self, loader, sampler, held):
        for self.state.epoch in self.ks.epochs(4):  # noqa: B020
            sampler.set_epoch(self.state.epoch)
            for x, y in self.ks.batches(loader):
                loss = self.step(x, y)
                self.history["loss"].append(loss)
                self.call("on_step_end", loss)
                self.global_step += 1
                self.state.drawn.append(random.random())
            score = self.evaluate(*held)
            self.history["eval"].append(score)
            self.call("on_eval_end", score)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(607)
    trainer = Trainer(Config(), rank)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(64))
    trainer.fit(loader, sampler, zoolib.vectors(32).tensors)
    lr, roll = trainer.callbacks
    zoolib.finish(
        args,
        trainer.history["loss"],
        model=trainer.model,
        optimizer=trainer.optimizer,
        history=trainer.history,
        state=vars(trainer.state),
        best=roll.weights,
        config=vars(trainer.config),
        lrs=lr.history,
    )


if __name__ == "__main__":
    main()
