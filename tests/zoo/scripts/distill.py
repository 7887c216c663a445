"""Distillation: a fixed teacher, a student, and a temperature that falls from epoch to epoch.

The teacher is attached by nobody, and its bias moves after every epoch; the temperature is a
variable of the loop.
"""

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
    def train_step(x, y, T):
        with torch.no_grad():
            soft = nn.functional.softmax(teacher(x) / T, dim=1)
        logits = student(x)
        distilled = nn.functional.kl_div(
            nn.functional.log_softmax(logits / T, dim=1), soft, reduction="batchmean"
        )
        loss = 0.5 * T * T * distilled + 0.5 * nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, T = [], 4.0
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y, T))
        T = T / 2
        teacher[3].bias.add_(0.1)
        scheduler.step()
    zoolib.finish(args, losses, student=student, optimizer=optimizer, scheduler=scheduler,
                  teacher=teacher, T=T)  # fmt: skip


if __name__ == "__main__":
    main()
