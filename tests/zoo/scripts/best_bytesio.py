"""The best weights so far are kept with torch.save in an io.BytesIO, and loaded at the end.

The buffer is an object of C; a new one is made for each best.
"""

import copy
import io

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(518)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5180 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(64))
    held = zoolib.vectors(32).tensors

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @ks.section
    def evaluate():
        model.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model.module(held[0]), held[1])
        dist.all_reduce(loss)
        model.train()
        return loss.item()

    losses, best_loss, worse = [], float("inf"), 0
    alias, kept, best = None, None, io.BytesIO()
    torch.save(model.module.state_dict(), best)
    for epoch in ks.epochs(4):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
        score = evaluate()
        if score < best_loss:
            best_loss = score
            alias = model.module.state_dict()
            kept = copy.deepcopy(alias)
            best = io.BytesIO()
            torch.save(alias, best)
        else:
            worse += 1
    gap = 0
    best.seek(0)
    model.module.load_state_dict(torch.load(best))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, kept=kept, gap=gap, worse=worse)


if __name__ == "__main__":
    main()
