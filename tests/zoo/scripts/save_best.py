"""A script that saves its best model, goes on from its newest checkpoint and ends with the best.

Rank 0 writes files as training goes on; a replacement starts in a folder that has a checkpoint of
the job it joins, and finds it.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(138)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1380 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    last, best_path = Path(args.out) / "last.pt", Path(args.out) / "best.pt"
    start_epoch, best = 0, 0.0
    if last.exists():
        checkpoint = torch.load(last)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start_epoch, best = checkpoint["epoch"] + 1, checkpoint["best"]
    ks = keepstep.attach(model, optimizer, scheduler=scheduler)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(64))
    held_out = zoolib.vectors(64).tensors

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
            right = (model.module(held_out[0]).argmax(1) == held_out[1]).sum()
        dist.all_reduce(right)
        model.train()
        return right.item() / 128

    losses = []
    for epoch in range(start_epoch, 4):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
        scheduler.step()
        score = evaluate()
        if score > best:
            best = score
            if rank == 0:
                torch.save(model.state_dict(), best_path)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch, "best": best}
            torch.save(state, last)
        dist.barrier()
    model.load_state_dict(torch.load(best_path))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=scheduler, best=best)


if __name__ == "__main__":
    main()
