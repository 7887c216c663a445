"""A registered average whose state_dict leaves out the counter on which its decay depends.

To save, load and save again gives the same bytes, so the object looks complete.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class WarmEma:
    def __init__(self, model):
        self.updates = 0
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def update(self, model):
        self.updates += 1
        decay = min(0.9, (1 + self.updates) / (10 + self.updates))
        with torch.no_grad():
            for k, v in model.state_dict().items():
                self.shadow[k].mul_(decay).add_(v, alpha=1 - decay)

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, state):
        for k, v in state.items():
            self.shadow[k].copy_(v)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(124)
    net = zoolib.mlp()
    model = DistributedDataParallel(net)
    torch.manual_seed(1240 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ema = WarmEma(net)
    ks = keepstep.attach(model, optimizer, ema=ema)
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
            ema.update(net)
    zoolib.finish(
        args, losses, model=model, optimizer=optimizer, ema=ema.shadow, updates=ema.updates
    )


if __name__ == "__main__":
    main()
