"""An average of the weights that only rank 0 keeps, and registers.

No other rank has it: there is nothing to compare it with, nor to copy it from.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class ModelEma:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def update(self, model):
        with torch.no_grad():
            for k, v in model.state_dict().items():
                if v.is_floating_point():
                    self.shadow[k].mul_(self.decay).add_(v, alpha=1 - self.decay)
                else:
                    self.shadow[k].copy_(v)

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, state):
        for k, v in state.items():
            self.shadow[k].copy_(v)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(53)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(530 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    ema = None
    if rank == 0:
        ema = ModelEma(net)
        ks.register("ema", ema)
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
            if ema is not None:
                ema.update(net)
    zoolib.finish(args, losses, model=model, optimizer=optimizer, ema=ema and ema.shadow)


if __name__ == "__main__":
    main()
