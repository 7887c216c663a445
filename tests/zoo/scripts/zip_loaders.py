"""Semi-supervised training: a labelled and an unlabelled loader side by side in `zip`.

Two positions move together, and the shorter loader ends the epoch after the longer one was asked.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(101)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1010 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    labelled, sampler = zoolib.sharded_loader(zoolib.vectors(112), 8)
    unlabelled, _ = zoolib.sharded_loader(zoolib.vectors(256), 8)

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
        pairs = zip(ks.batches(labelled), ks.batches(unlabelled))
        for step, ((x, y), (u, _)) in enumerate(pairs):
            with torch.no_grad():
                pseudo = model.module(u).argmax(1)
            losses.append(train_step(torch.cat([x, u + 0.1]), torch.cat([y, pseudo])))
            if step % 4 == 0:
                print(f"epoch {epoch} step {step} loss {losses[-1]:.4f}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
