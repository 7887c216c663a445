"""Curriculum learning: a sampler that serves harder samples as its own counter grows.

The sampler keeps `self.competence`, which the training loop raises after every step, and draws
with numpy's global generator while batches are served.
"""

import numpy as np
import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

import keepstep


class CurriculumSampler(Sampler):
    def __init__(self, difficulty, length):
        self.order = np.argsort(difficulty)
        self.length, self.competence = length, 0.2

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            allowed = max(8, int(self.competence * len(self.order)))
            yield int(self.order[np.random.randint(allowed)])

    def advance(self):
        self.competence = min(1.0, self.competence + 0.05)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(74)
    data = zoolib.vectors()
    model = DistributedDataParallel(zoolib.mlp())
    zoolib.seed_everything(740 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    sampler = CurriculumSampler(data.tensors[0].norm(dim=1).numpy(), length=64)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
            sampler.advance()
        print(f"epoch {epoch} competence {sampler.competence:.2f}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer, competence=sampler.competence)


if __name__ == "__main__":
    main()
