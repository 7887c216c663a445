"""SimCLR: features of all ranks are gathered inside the step, with gradients.

An autograd function with collectives in forward and backward, LARS-like scaling of gradients by
hand, and a scheduler that steps per epoch only after a warm-up.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        output = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(output, x.contiguous())
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        all_gradients = torch.stack(grads)
        dist.all_reduce(all_gradients)
        return all_gradients[dist.get_rank()]


def nt_xent(z_i, z_j, temperature=0.5):
    z = torch.cat([torch.cat(GatherLayer.apply(z_i)), torch.cat(GatherLayer.apply(z_j))])
    z = nn.functional.normalize(z, dim=1)
    n = len(z)
    sim = (z @ z.T / temperature).masked_fill(torch.eye(n, dtype=torch.bool), -1e9)
    return nn.functional.cross_entropy(sim, (torch.arange(n) + n // 2) % n)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(33)
    net = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8)
    )
    model = DistributedDataParallel(net)
    torch.manual_seed(330 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    ks = keepstep.attach(model, optimizer, scheduler=scheduler)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors(80), drop_last=True)

    @ks.step
    def train_step(x):
        views = torch.cat([x + 0.1 * torch.randn_like(x), x * torch.rand(len(x), 1)])
        loss = nt_xent(*model(views).chunk(2))
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad.mul_(0.1 * p.norm() / (p.grad.norm() + 1e-3))
        optimizer.step()
        return loss.item()

    losses, loss_epoch = [], 0.0
    for epoch in ks.epochs(3):
        sampler.set_epoch(epoch)
        loss_epoch = 0.0
        for x, _ in ks.batches(loader):
            loss = train_step(x)
            loss_epoch += loss
            losses.append(loss)
        if epoch >= 1:
            scheduler.step()
        print(f"Epoch [{epoch}/3] Loss: {loss_epoch / len(loader)}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=scheduler,
                  loss_epoch=loss_epoch)  # fmt: skip


if __name__ == "__main__":
    main()
