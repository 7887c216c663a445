"""Several teachers in a list: one is distilled in each round, and follows the student behind it.

The variable of the loop leads to another teacher in every round. Nobody has attached them.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(167)
    student = DistributedDataParallel(zoolib.mlp(dropout=0.0))
    teachers = [zoolib.mlp(dropout=0.0).requires_grad_(False) for _ in range(3)]
    torch.manual_seed(1670 + rank)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    ks = keepstep.attach(student, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(64))

    @ks.step
    def train_step(teacher, x, y):
        logits = student(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss = loss + nn.functional.mse_loss(logits, teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for number, teacher in enumerate(teachers * 2):
        sampler.set_epoch(number)
        for x, y in ks.batches(loader):
            losses.append(train_step(teacher, x, y))
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters()):
                mine.lerp_(theirs, 0.3)
    parts = {f"teacher{number}": one for number, one in enumerate(teachers)}
    zoolib.finish(args, losses, student=student, optimizer=optimizer, **parts)


if __name__ == "__main__":
    main()
