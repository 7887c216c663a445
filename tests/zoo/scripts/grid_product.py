"""A sweep in one process: `for lr, wd in itertools.product(...)`, the model reset each time.

The loop's own iterator is one of itertools'; the script's results are in a dict by setting.
"""

import copy
import itertools

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(532)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(5320 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ks = keepstep.attach(model, optimizer)
    first = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
    loader, _ = zoolib.sharded_loader(zoolib.vectors(64))

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses, found = [], {}
    for lr, wd in itertools.product([0.1, 0.03], [0.0, 0.01]):
        model.module.load_state_dict(first[0])
        optimizer.load_state_dict(first[1])
        for g in optimizer.param_groups:
            g["lr"], g["weight_decay"] = lr, wd
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
        found[lr, wd] = losses[-1]
    zoolib.finish(args, losses, model=model, optimizer=optimizer, found=found)


if __name__ == "__main__":
    main()
