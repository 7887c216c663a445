"""torch.compile with ahead-of-time autograd, and a scheduler between the steps.

Forward and backward pass are graphs; the random state of dropout is handled by the compiler.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

args, rank, world = zoolib.start()
zoolib.seed_everything(94)
net = zoolib.mlp()
model = DistributedDataParallel(torch.compile(net, backend="aot_eager"))
torch.manual_seed(940 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
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
zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=scheduler)
