"""Weights are exchanged for their average inside a section, evaluated, and put back at its end.

A rank that is lost in the section's collective leaves the others with the average in the model. The
section is tried again, and would take that for the weights that it puts back. Wherever the
collective comes through, the weights are as they were: nothing in the section's end tells.
"""

import copy

import torch
import torch.distributed as dist
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(57)
    model = zoolib.spread(zoolib.mlp(), args)
    ema = copy.deepcopy(model.module).requires_grad_(False)
    torch.manual_seed(570 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    ks.register("ema", ema)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    held_out = zoolib.vectors(32).tensors

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for average, p in zip(ema.parameters(), model.parameters()):
                average.lerp_(p, 0.1)
        return loss.item()

    @ks.section
    def evaluate():
        backup = {k: v.clone() for k, v in model.module.state_dict().items()}
        model.module.load_state_dict(ema.state_dict())
        with torch.no_grad():
            score = nn.functional.cross_entropy(model.module(held_out[0]), held_out[1])
        dist.all_reduce(score)
        model.module.load_state_dict(backup)
        return score.item()

    losses, scores = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            losses.append(train_step(x, y))
            if i % 2:
                scores.append(evaluate())
    zoolib.finish(args, losses, model=model, optimizer=optimizer, ema=ema, scores=scores)


if __name__ == "__main__":
    main()
