"""The loss function is exchanged in the second epoch, and an activation along with it.

Names that are bound to functions: one of torch, one of the script's, one in C. A replacement that
comes later builds its names anew, with what they were bound to first.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def plain(logits):
    return logits


def sharpened(logits):
    return 1.5 * logits


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(125)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1250 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    criterion, shape, squash = nn.functional.cross_entropy, plain, torch.tanh

    @ks.step
    def train_step(x, y):
        loss = criterion(shape(model(squash(x))), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(4):
        sampler.set_epoch(epoch)
        if epoch == 1:
            criterion, shape, squash = nn.functional.multi_margin_loss, sharpened, torch.sigmoid
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
