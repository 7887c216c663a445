"""Mixed precision with autocast and GradScaler, scaler and scheduler updated in the usual order.

The scaler skips steps when gradients overflow, the scheduler must not step then, and the check
compares the scale before and after, outside the protected step.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(62)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(620 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    ks = keepstep.attach(model, optimizer, scheduler=scheduler, scaler=scaler)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    losses, skipped = [], 0
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            scale_before = scaler.get_scale()
            losses.append(train_step(x, y))
            if scaler.get_scale() < scale_before:
                skipped += 1
            else:
                scheduler.step()
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=scheduler,
                  scaler=scaler, skipped=skipped)  # fmt: skip


if __name__ == "__main__":
    main()
