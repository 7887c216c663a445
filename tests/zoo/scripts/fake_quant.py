"""Quantisation-aware training: fake quantisation with observers that stop in the second epoch.

Observers keep minima and maxima in buffers that begin as infinities, the flags that enable them
are buffers too, and they are switched between epochs.
"""

import torch
import zoolib
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, disable_observer
from torch.nn.parallel import DistributedDataParallel

import keepstep


def fake_quantize(dtype=torch.quint8):
    return FakeQuantize(
        MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=dtype, averaging_constant=0.1
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)
        self.quant_x, self.quant_h = fake_quantize(), fake_quantize()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.fc2(self.quant_h(self.drop(torch.relu(self.fc1(self.quant_x(x))))))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(123)
    model = DistributedDataParallel(Net())
    torch.manual_seed(1230 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
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
        if epoch > 0:
            model.apply(disable_observer)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
