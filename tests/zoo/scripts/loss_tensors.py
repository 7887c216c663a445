"""Losses kept as tensors: some with their graph, an average in bfloat16, the last few in a window.

No step reads any of them, but the script's own numbers are made of them.
"""

from collections import deque

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(39)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(390 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    history, window = [], deque(maxlen=3)
    average = torch.zeros((), dtype=torch.bfloat16)
    total = 0.0
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            loss = train_step(x, y)
            history.append(loss)
            window.append(loss.detach().bfloat16())
            average = 0.9 * average + 0.1 * loss.detach().bfloat16()
            total = total + loss
    report = [average.float(), torch.stack(list(window)).float(), total.detach()]
    zoolib.finish(
        args, [x.item() for x in history], model=model, optimizer=optimizer, script=report
    )


if __name__ == "__main__":
    main()
