"""AutoClip: gradients are clipped at a percentile of all norms seen so far.

The history of norms is a list that the step appends to before its update; it decides the update.
"""

import numpy as np
import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(119)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1190 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    grad_history = []
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        grad_history.append(norm)
        nn.utils.clip_grad_norm_(model.parameters(), np.percentile(grad_history, 30))
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, history=grad_history)


if __name__ == "__main__":
    main()
