"""Gradient accumulation with all micro-batches in one protected step.

Only the last micro-batch synchronises; the batch is cut into pieces inside the step and a running
loss is kept in a variable of the outer function.
"""

import contextlib

import torch
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(63)
    model = zoolib.spread(zoolib.mlp(dropout=0.3), args)
    torch.manual_seed(630 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    micro = 4

    def no_sync():
        return contextlib.nullcontext() if args.fsdp else model.no_sync()

    @ks.step
    def train_step(x, y):
        total = 0.0
        pieces = list(zip(x.chunk(micro), y.chunk(micro)))
        for i, (inputs, labels) in enumerate(pieces):
            last = i == len(pieces) - 1
            if args.fsdp:
                model.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last else no_sync():
                loss = nn.functional.cross_entropy(model(inputs), labels) / micro
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    losses, running = [], None
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            loss = train_step(x, y)
            running = loss if running is None else 0.9 * running + 0.1 * loss
            losses.append(loss)
        print(f"epoch {epoch}: {running:.4f}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer, running=running)


if __name__ == "__main__":
    main()
