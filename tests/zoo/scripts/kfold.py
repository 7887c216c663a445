"""k-fold cross-validation: the same model and optimizer start afresh in every fold.

Weights go back to those of the beginning, `optimizer.state` becomes a new dict; subsets, loaders
and the scheduler are made anew in each fold; scores are in a dict.
"""

import copy
from collections import defaultdict

import numpy as np
import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SubsetRandomSampler

import keepstep


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(604)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(6040 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    fresh = copy.deepcopy(model.module.state_dict())
    data = zoolib.vectors(96)
    folds = np.array_split(np.random.RandomState(0).permutation(96), 3)

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @ks.section
    def evaluate(indices):
        model.eval()
        x, y = data[indices]
        with torch.no_grad():
            right = (model.module(x).argmax(1) == y).sum()
        dist.all_reduce(right)
        model.train()
        return right.item() / (world * len(indices))

    losses, scores = [], defaultdict(list)
    for fold, held in enumerate(folds):
        train = np.concatenate([f for i, f in enumerate(folds) if i != fold])[rank::world]
        model.module.load_state_dict(fresh)
        optimizer.state = defaultdict(dict)
        for g in optimizer.param_groups:
            g["lr"] = 5e-3
        loader = DataLoader(data, 8, sampler=SubsetRandomSampler(train.tolist()))
        for _ in range(2):
            for x, y in ks.batches(loader):
                losses.append(train_step(x, y))
            for g in optimizer.param_groups:
                g["lr"] *= 0.5
            scores[fold].append(evaluate(held.tolist()))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, scores=scores)


if __name__ == "__main__":
    main()
