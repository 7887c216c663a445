"""An average of the weights as timm has it, updated in the step behind the optimizer.

The average is given to attach and changes after the step's first update; of sharded weights each
rank has a part that nobody else has.
"""

import torch
import zoolib
from torch import nn

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
    zoolib.seed_everything(52)
    net = zoolib.mlp()
    model = zoolib.spread(net, args)
    torch.manual_seed(520 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ema = ModelEma(model)
    ks = keepstep.attach(model, optimizer, ema=ema)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, ema=ema.shadow)


if __name__ == "__main__":
    main()
