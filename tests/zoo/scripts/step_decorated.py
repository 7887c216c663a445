"""A step under a decorator of torch's: `@ks.step @torch.autocast(...)`.

What it returns is made behind the update, by a function that the decorator hides.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(611)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(6110 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    seen = {"n": 0.0}

    @ks.step
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norm = sum(p.detach().norm() for p in model.parameters()).item()
        seen["n"] += loss.item() * norm
        return loss.item(), norm

    losses, norms = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            loss, norm = train_step(x, y)
            losses.append(loss)
            norms.append(norm)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, norms=norms, seen=seen)


if __name__ == "__main__":
    main()
