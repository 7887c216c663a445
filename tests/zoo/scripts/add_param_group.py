"""Fine-tuning with add_param_group: the backbone joins the optimizer in the second epoch.

The optimizer of a replacement is built with one group, that of the others has two by then.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 4))

    def forward(self, x):
        return self.head(self.backbone(x))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(72)
    net = Net()
    model = DistributedDataParallel(net)
    torch.manual_seed(720 + rank)
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        if epoch == 1:
            optimizer.add_param_group({"params": net.backbone.parameters(), "lr": 0.02})
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
