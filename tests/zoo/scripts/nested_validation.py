"""Validation over its own loader in the middle of a training epoch, and a best score.

A loop over a second loader inside the first, with steps of neither; `best` decides what is kept.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(103)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1030 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    held_out, _ = zoolib.sharded_loader(zoolib.vectors(48))

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @ks.section
    def validate():
        model.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for x, y in ks.batches(held_out):
                total += nn.functional.cross_entropy(model.module(x), y)
        dist.all_reduce(total)
        model.train()
        return total.item()

    losses, best, best_state = [], float("inf"), None
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            losses.append(train_step(x, y))
            if (i + 1) % 4 == 0:
                score = validate()
                if score < best:
                    best = score
                    best_state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(best_state)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, best=best)


if __name__ == "__main__":
    main()
