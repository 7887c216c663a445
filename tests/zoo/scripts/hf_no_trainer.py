"""The no_trainer scripts of Hugging Face: `completed_steps`, accumulation by `step % accum`.

One protected step per micro-batch; which of them update depends on the index of `enumerate`. The
scheduler steps inside with the update, the progress bar and `completed_steps` count outside.
"""

import math

import torch
import torch.distributed as dist
import zoolib
from torch import nn

import keepstep


class ProgressBar:
    def __init__(self, total):
        self.n, self.total = 0, total

    def update(self, n):
        self.n += n
        print(f"{self.n}/{self.total}", end="\r")


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(42)
    model = zoolib.spread(zoolib.mlp(), args)
    torch.manual_seed(42 + rank)
    no_decay = [p for p in model.parameters() if p.ndim == 1]
    decay = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    accum, num_train_epochs = 2, 2
    train_dataloader, sampler = zoolib.sharded_loader(zoolib.vectors())
    eval_dataloader, _ = zoolib.sharded_loader(zoolib.vectors(32))
    max_train_steps = num_train_epochs * math.ceil(len(train_dataloader) / accum)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: max(0.0, 1 - s / max_train_steps)
    )
    ks = keepstep.attach(model, optimizer, scheduler=lr_scheduler)

    @ks.step
    def training_step(step, batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels) / accum
        loss.backward()
        if step % accum == accum - 1 or step == len(train_dataloader) - 1:
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        return loss.detach()

    @ks.section
    def evaluation():
        model.eval()
        with torch.no_grad():
            found = [nn.functional.cross_entropy(model(x), y) for x, y in eval_dataloader]
        mean = torch.stack(found).mean()
        dist.all_reduce(mean)
        return math.exp(mean.item() / dist.get_world_size())

    progress_bar = ProgressBar(max_train_steps)
    completed_steps, losses = 0, []
    for epoch in ks.epochs(num_train_epochs):
        model.train()
        total_loss = 0
        sampler.set_epoch(epoch)
        for step, batch in enumerate(ks.batches(train_dataloader)):
            loss = training_step(step, batch)
            total_loss += loss.float()
            losses.append(loss.item())
            if step % accum == accum - 1 or step == len(train_dataloader) - 1:
                progress_bar.update(1)
                completed_steps += 1
            if completed_steps >= max_train_steps:
                break
        perplexity = evaluation()
        print(
            f"epoch {epoch}: perplexity {perplexity} train_loss {total_loss.item() / len(losses)}"
        )
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scheduler=lr_scheduler,
                  completed_steps=completed_steps, perplexity=perplexity,
                  total_loss=total_loss.item())  # fmt: skip


if __name__ == "__main__":
    main()
