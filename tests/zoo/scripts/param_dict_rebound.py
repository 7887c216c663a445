"""Averages in dicts keyed by parameters, whose values are new objects each time, and by id(p).

`shadow[p] = d * shadow[p] + (1 - d) * p.data` and `norms[p] = 0.9 * norms[p] + ...`.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(561)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5610 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    shadow = {p: p.detach().clone() for p in model.parameters()}
    norms = dict.fromkeys(model.parameters(), 1.0)
    counts = {id(p): 0 for p in model.parameters()}

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        loss = loss + 0.01 * sum((p - shadow[p]).square().sum() for p in model.parameters())
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            norm = p.grad.norm().item()
            p.grad.mul_(min(1.0, norms[p] / (norm + 1e-6)))
            norms[p] = 0.9 * norms[p] + 0.1 * norm
            counts[id(p)] += norm > 0.5
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
            for p in model.parameters():
                shadow[p] = 0.9 * shadow[p] + 0.1 * p.data
    zoolib.finish(
        args,
        losses,
        model=model,
        optimizer=optimizer,
        shadow=list(shadow.values()),
        norms=list(norms.values()),
        counts=list(counts.values()),
    )


if __name__ == "__main__":
    main()
