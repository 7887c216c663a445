"""Self-distillation: every epoch's teacher is a copy of the student as the epoch before left it.

Nothing is attached but the student. The name `teacher` stands for another model in every epoch, a
pool keeps the older ones, and the best model so far is a copy, too.
"""

import copy

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(163)
    student = DistributedDataParallel(zoolib.mlp(dropout=0.0))
    torch.manual_seed(1630 + rank)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    ks = keepstep.attach(student, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(64))
    held_out = zoolib.vectors(64).tensors

    @ks.step
    def train_step(x, y, teacher, older):
        with torch.no_grad():
            soft = sum(nn.functional.softmax(one(x), dim=1) for one in [teacher, *older])
        logits = student(x)
        loss = nn.functional.cross_entropy(logits, y) - 0.1 * (soft * logits).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, pool, best, best_score = [], [], None, -1.0
    teacher = copy.deepcopy(student.module).requires_grad_(False)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y, teacher, pool))
        pool.append(teacher)
        teacher = copy.deepcopy(student.module).requires_grad_(False)
        with torch.no_grad():
            score = (student.module(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
        if score > best_score:
            best_score, best = score, copy.deepcopy(student.module)
    older = {f"pool{n}": one for n, one in enumerate(pool)}
    zoolib.finish(args, losses, student=student, optimizer=optimizer, teacher=teacher, best=best,
                  best_score=best_score, **older)  # fmt: skip


if __name__ == "__main__":
    main()
