"""OneCycleLR between the steps, with momentum that cycles as well.

`scheduler.step()` follows the protected step and changes two values of every group.
"""

import torch
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(109)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(1090 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=16)
    ks = keepstep.attach(model, optimizer, scheduler=scheduler)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
            scheduler.step()
        print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.4f}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
