"""A no_trainer loop that updates every batch and steps its scheduler and counter outside.

`lr_scheduler.step()` and `completed_steps += 1` come after the protected step, an evaluation
follows every fifth completed step, and the loop ends by the counter.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(43)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(43 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15)
    ks = keepstep.attach(model, optimizer, scheduler=lr_scheduler)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    held_out = zoolib.vectors(32).tensors

    @ks.step
    def training_step(batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    @ks.section
    def evaluate():
        model.eval()
        with torch.no_grad():
            right = (model.module(held_out[0]).argmax(1) == held_out[1]).sum()
        dist.all_reduce(right)
        model.train()
        return right.item()

    completed_steps, losses, scores = 0, [], []
    running_loss = 0.0
    for epoch in ks.epochs(3):
        sampler.set_epoch(epoch)
        for batch in ks.batches(loader):
            loss = training_step(batch)
            lr_scheduler.step()
            completed_steps += 1
            running_loss = 0.95 * running_loss + 0.05 * loss.item()
            losses.append(loss.item())
            if completed_steps % 5 == 0:
                scores.append(evaluate())
                print(f"step {completed_steps} lr {lr_scheduler.get_last_lr()[0]:.2e}")
            if completed_steps >= 15:
                break
        if completed_steps >= 15:
            break
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=lr_scheduler,
                  completed_steps=completed_steps, running_loss=running_loss,
                  scores=scores)  # fmt: skip


if __name__ == "__main__":
    main()
