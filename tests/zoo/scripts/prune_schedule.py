"""torch.nn.utils.prune in the middle of training: every epoch a little more of the weights is
masked.

`prune.l1_unstructured` renames the parameter to weight_orig, registers a mask and a hook.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(609)
    net = zoolib.mlp()
    for m in net:
        if isinstance(m, nn.Linear):
            prune.identity(m, "weight")
    model = DistributedDataParallel(net)
    torch.manual_seed(6090 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(64))

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(4):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
        for m in net:
            if isinstance(m, nn.Linear):
                prune.l1_unstructured(m, "weight", amount=0.2)
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
