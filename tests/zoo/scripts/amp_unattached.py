"""Mixed precision in the usual way, with a GradScaler that is not given to attach.

`scaler.step` notes that it has unscaled the gradients; a step that is tried again unscales them
once more. The scaler's growth shows in every later step.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(164)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1640 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scaler=scaler)


if __name__ == "__main__":
    main()
