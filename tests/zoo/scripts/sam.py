"""Sharpness-aware minimisation by hand: weights are perturbed and restored inside the step.

Between the two passes the parameters are not those of any committed step: a kill there must not
leave the survivors with perturbed weights.
"""

import torch
import zoolib
from torch import nn

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(41)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(410 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    ks = keepstep.attach(model, optimizer, scheduler=scheduler)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    rho = 0.05

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if args.fsdp:
            grad_norm = grad_norm.full_tensor()
        added = []
        with torch.no_grad():
            for p in model.parameters():
                e_w = p.grad * (rho / (grad_norm.item() + 1e-12))
                p.add_(e_w)
                added.append(e_w)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, e_w in zip(model.parameters(), added):
                p.sub_(e_w)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
            scheduler.step()
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
