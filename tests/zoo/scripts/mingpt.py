"""minGPT's Trainer: callbacks, `iter_num`, an iterator that is made again when it is used up.

The loop is `while True` over `next(data_iter)`; the trainer counts its own iterations, and a
callback keeps a smoothed loss.
"""

from collections import defaultdict

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Trainer:
    def __init__(self, model, loader, max_iters):
        self.model, self.loader, self.max_iters = model, loader, max_iters
        self.callbacks = defaultdict(list)
        self.iter_num, self.loss = 0, None
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks[onevent]:
            callback(self)

    def run(self):
        self.ks = keepstep.attach(self.model, self.optimizer)
        step = self.ks.step(self.train_step)
        self.model.train()
        data_iter = iter(self.ks.batches(self.loader))
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(self.ks.batches(self.loader))
                batch = next(data_iter)
            self.loss = step(*batch)
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if self.iter_num >= self.max_iters:
                break

    def train_step(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(3407)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(rank)
    loader, _ = zoolib.sharded_loader(zoolib.vectors())
    trainer = Trainer(model, loader, max_iters=14)
    losses, smoothed = [], [0.0]

    def batch_end_callback(trainer):
        losses.append(trainer.loss)
        smoothed[0] = 0.9 * smoothed[0] + 0.1 * trainer.loss
        if trainer.iter_num % 5 == 0 and rank == 0:
            print(f"iter {trainer.iter_num}: train loss {smoothed[0]:.5f}")

    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.run()
    zoolib.finish(args, losses, model=model, optimizer=trainer.optimizer,
                  iter_num=trainer.iter_num, smoothed=smoothed)  # fmt: skip


if __name__ == "__main__":
    main()
