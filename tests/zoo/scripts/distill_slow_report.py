"""Distillation whose epochs end with some work on the host: the teacher moves, a report is written.

Nobody attaches the teacher, which changes for the first time where an epoch ends; the ranks hear of
a failure while they write, and not in a step.
"""

import time

import torch
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(129)
    teacher = zoolib.mlp(hidden=48, dropout=0.0).eval().requires_grad_(False)
    student = zoolib.spread(zoolib.mlp(hidden=16), args)
    torch.manual_seed(1290 + rank)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ks = keepstep.attach(student, optimizer, scheduler=scheduler)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        with torch.no_grad():
            soft = nn.functional.softmax(teacher(x) / 2, dim=1)
        logits = student(x)
        distilled = nn.functional.kl_div(
            nn.functional.log_softmax(logits / 2, dim=1), soft, reduction="batchmean"
        )
        loss = 2 * distilled + 0.5 * nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
        teacher[3].bias.add_(0.1)
        scheduler.step()
        time.sleep(2)
    zoolib.finish(args, losses, student=student, optimizer=optimizer, scheduler=scheduler,
                  teacher=teacher)  # fmt: skip


if __name__ == "__main__":
    main()
