"""An average of the weights kept as buffers of the model itself, as in diffusion code.

The buffers change behind the optimizer's update; DDP broadcasts them at the next forward pass.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class LitEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.body = model
        self.register_buffer("decay", torch.tensor(decay))
        self.register_buffer("num_updates", torch.tensor(0))
        for name, p in model.named_parameters():
            self.register_buffer(name.replace(".", ""), p.clone().detach())

    def forward(self, x):
        return self.body(x)

    @torch.no_grad()
    def average(self):
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        shadow = dict(self.named_buffers())
        for name, p in self.body.named_parameters():
            shadow[name.replace(".", "")].sub_((1.0 - decay) * (shadow[name.replace(".", "")] - p))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(58)
    net = LitEma(zoolib.mlp())
    model = DistributedDataParallel(net)
    torch.manual_seed(580 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.average()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, ema=list(net.buffers()))


if __name__ == "__main__":
    main()
