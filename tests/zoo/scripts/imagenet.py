"""The ImageNet example of PyTorch: AverageMeter, accuracy, validation, best checkpoint.

DDP's defaults broadcast BatchNorm's buffers, the scheduler steps after the epoch, `best_acc1` and
the meters are plain variables, and validation goes through the DDP module.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean().item() * 100


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.fc(torch.relu(x + self.block(x)).mean((2, 3)))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(1)
    model = DistributedDataParallel(ResNet())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.1)
    ks = keepstep.attach(model, optimizer, scheduler=scheduler)
    train_loader, train_sampler = zoolib.sharded_loader(zoolib.images())
    val_loader, _ = zoolib.sharded_loader(zoolib.images(32))

    @ks.step
    def train_step(images, target):
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item(), accuracy(output, target)

    @ks.section
    def validate():
        model.eval()
        top1 = AverageMeter("Acc@1")
        with torch.no_grad():
            for images, target in val_loader:
                top1.update(accuracy(model(images), target), len(target))
        total = torch.tensor([top1.sum, top1.count])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    history, best_acc1 = [], 0.0
    for epoch in ks.epochs(2):
        train_sampler.set_epoch(epoch)
        losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
        model.train()
        for i, (images, target) in enumerate(ks.batches(train_loader)):
            loss, acc1 = train_step(images, target)
            losses.update(loss, len(images))
            top1.update(acc1, len(images))
            history.append(loss)
            if i % 4 == 0:
                print(f"Epoch: [{epoch}][{i}/{len(train_loader)}] Loss {losses.avg:.4f}")
        acc1 = validate()
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if rank == 0 and is_best:
            torch.save({"epoch": epoch, "best": best_acc1}, Path(args.out) / "best.pt")
    zoolib.finish(args, history, model=model, optimizer=optimizer, scheduler=scheduler,
                  best=best_acc1, meters=[losses.avg, top1.avg])  # fmt: skip


if __name__ == "__main__":
    main()
