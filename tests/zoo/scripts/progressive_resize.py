"""Progressive resizing: every epoch has larger images, another batch size and a new DataLoader.

Loader and sampler are made inside the epoch's loop; shapes of the steps change with the epoch.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import keepstep

SCHEDULE = [(6, 8), (8, 8), (12, 16)]  # image size, batch size


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(73)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 4),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    torch.manual_seed(730 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    data = zoolib.images(96, size=12)

    @ks.step
    def train_step(images, labels):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(len(SCHEDULE)):
        size, batch_size = SCHEDULE[epoch]
        sampler = DistributedSampler(data, shuffle=True)
        sampler.set_epoch(epoch)
        loader = DataLoader(data, batch_size, sampler=sampler)
        for images, labels in ks.batches(loader):
            images = nn.functional.interpolate(images, size=(size, size), mode="bilinear")
            losses.append(train_step(images, labels))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
