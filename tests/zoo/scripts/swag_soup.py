"""SWAG and snapshots: running mean and square of the weights, a list of deviations, a soup at the
end.

Vectors of all parameters are collected in a list with a maximal rank; snapshots are deep copies of
state_dicts in a list; the greedy soup loads and averages them in a section.
"""

import copy

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import keepstep


class SWAG:
    def __init__(self, model, max_rank=3):
        self.model, self.max_rank = model, max_rank
        self.n_models, self.deviations = 0, []
        self.mean = torch.zeros_like(parameters_to_vector(model.parameters()).detach())
        self.sq_mean = self.mean.clone()

    @torch.no_grad()
    def collect(self):
        w = parameters_to_vector(self.model.parameters())
        n = self.n_models
        self.mean = self.mean * n / (n + 1) + w / (n + 1)
        self.sq_mean = self.sq_mean * n / (n + 1) + w**2 / (n + 1)
        self.deviations.append(w - self.mean)
        if len(self.deviations) > self.max_rank:
            self.deviations.pop(0)
        self.n_models += 1


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(605)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(6050 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    held = zoolib.vectors(32).tensors
    swag, snapshots = SWAG(model.module), []

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @ks.section
    def soup(candidates):
        kept, best, own = [], float("inf"), copy.deepcopy(model.module.state_dict())
        model.eval()
        for candidate in candidates:
            tried = [*kept, candidate]
            mean = {k: sum(c[k] for c in tried) / len(tried) for k in candidate}
            model.module.load_state_dict(mean)
            with torch.no_grad():
                loss = nn.functional.cross_entropy(model.module(held[0]), held[1])
            dist.all_reduce(loss)
            if loss.item() < best:
                best, kept = loss.item(), tried
        model.module.load_state_dict(own)
        model.train()
        return best, len(kept)

    losses, soups = [], []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(ks.batches(loader)):
            for g in optimizer.param_groups:
                g["lr"] = 0.1 * (1 - (i % 4) / 4)
            losses.append(train_step(x, y))
            if i % 2:
                swag.collect()
            if i % 4 == 3:
                snapshots.append(copy.deepcopy(model.module.state_dict()))
                soups.append(soup(snapshots))
    zoolib.finish(
        args,
        losses,
        model=model,
        optimizer=optimizer,
        soups=soups,
        mean=swag.mean,
        sq=swag.sq_mean,
        deviations=swag.deviations,
        n=swag.n_models,
        snapshots=snapshots,
    )


if __name__ == "__main__":
    main()
