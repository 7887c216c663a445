"""The Trainer class of minGPT-DDP: `_run_batch`, `_run_epoch`, snapshots, mixed precision.

The step is a method that is decorated when the trainer is built; a snapshot is written by rank 0
every epoch, and train and test epochs share one method.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Trainer:
    def __init__(self, args, rank, model, optimizer, train_data, test_data):
        self.args, self.rank = args, rank
        self.model, self.optimizer = model, optimizer
        self.train_loader, self.sampler = zoolib.sharded_loader(train_data)
        self.test_loader, _ = zoolib.sharded_loader(test_data)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
        self.epochs_run, self.global_step, self.losses = 0, 0, []
        self.ks = keepstep.attach(model, optimizer, scaler=self.scaler)
        self._train_batch = self.ks.step(self._train_batch)
        self._test_epoch = self.ks.section(self._test_epoch)

    def _train_batch(self, source, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(source), targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def _test_epoch(self):
        total = torch.zeros(())
        with torch.no_grad():
            for source, targets in self.test_loader:
                total += nn.functional.cross_entropy(self.model.module(source), targets)
        dist.all_reduce(total)
        return total.item()

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for it, (source, targets) in enumerate(self.ks.batches(self.train_loader)):
            loss = self._train_batch(source, targets)
            self.losses.append(loss)
            self.global_step += 1
            if it % 4 == 0:
                print(f"[RANK{self.rank}] epoch {epoch} | iter {it} | train loss {loss:.5f}")

    def _save_snapshot(self, epoch):
        if self.rank == 0:
            snapshot = {"model": self.model.module.state_dict(), "finished_epoch": epoch}
            torch.save(snapshot, Path(self.args.out) / "snapshot.pt")

    def train(self, epochs):
        for epoch in self.ks.epochs(epochs):
            self._run_epoch(epoch)
            self._save_snapshot(epoch)
            self.test_loss = self._test_epoch()
            self.epochs_run += 1


def main():
    args, rank, _ = zoolib.start()
    torch.manual_seed(5)
    model = DistributedDataParallel(zoolib.mlp(dropout=0.2))
    torch.manual_seed(50 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = Trainer(args, rank, model, optimizer, zoolib.vectors(), zoolib.vectors(32))
    trainer.train(2)
    zoolib.finish(args, trainer.losses, model=model, optimizer=optimizer, scaler=trainer.scaler,
                  test=trainer.test_loss,
                  counted=[trainer.epochs_run, trainer.global_step])  # fmt: skip


if __name__ == "__main__":
    main()
