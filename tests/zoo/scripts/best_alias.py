"""The best weights so far: `best = model.state_dict()` without a copy.

The dict is no copy: it shares its memory with the model and goes on with it, in every process.
"""

import copy

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
    alias, kept = None, None
    for epoch in ks.epochs(4):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
        score = evaluate()
        if score < best_loss:
            best_loss = score
            alias = model.module.state_dict()
            kept = copy.deepcopy(alias)
        else:
            worse += 1
    gap = sum((alias[k] - kept[k]).abs().sum().item() for k in alias)
    model.module.load_state_dict(alias)
    zoolib.finish(
        args, losses, model=model, optimizer=optimizer, alias=alias, kept=kept, gap=gap, worse=worse
    )


if __name__ == "__main__":
    main()
