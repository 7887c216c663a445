"""BYOL: a target network follows by an average whose rate depends on the learner's own counter.

The learner is an ordinary class with `global_step`; the target is a deep copy that is updated in
the step behind the optimizer, and nobody attaches it. It is too large to be compared as a whole
at every fence, and its forward changes the statistics of its norm before the update.
"""

import copy
import math

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class BYOL:
    def __init__(self, rank):
        self.online = DistributedDataParallel(
            nn.Sequential(nn.Linear(16, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 32))
        )
        self.target = copy.deepcopy(self.online.module).requires_grad_(False)
        self.predictor = DistributedDataParallel(zoolib.mlp(32, 16, 32, dropout=0.0))
        self.global_step, self.total_steps = 0, 16
        parameters = [*self.online.parameters(), *self.predictor.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=3e-3)
        self.ks = keepstep.attach([self.online, self.predictor], self.optimizer)
        self.train_step = self.ks.step(self._train_step)

    def tau(self):
        return 1 - 0.1 * (math.cos(math.pi * self.global_step / self.total_steps) + 1) / 2

    def _train_step(self, one, two):
        with torch.no_grad():
            target_one, target_two = self.target(one), self.target(two)
        loss = self._loss(self.predictor(self.online(one)), target_two)
        loss = loss + self._loss(self.predictor(self.online(two)), target_one)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        tau = self.tau()
        for p, t in zip(self.online.parameters(), self.target.parameters()):
            t.data.mul_(tau).add_(p.data, alpha=1 - tau)
        self.global_step += 1
        return loss.item()

    @staticmethod
    def _loss(p, z):
        return 2 - 2 * nn.functional.cosine_similarity(p, z, dim=-1).mean()


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(34)
    learner = BYOL(rank)
    zoolib.seed_everything(340 + rank)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    losses = []
    for epoch in learner.ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, _ in learner.ks.batches(loader):
            noisy = [x + 0.2 * torch.randn_like(x) for _ in range(2)]
            losses.append(learner.train_step(*noisy))
    zoolib.finish(args, losses, online=learner.online, target=learner.target,
                  predictor=learner.predictor, optimizer=learner.optimizer,
                  global_step=learner.global_step)  # fmt: skip


if __name__ == "__main__":
    main()
