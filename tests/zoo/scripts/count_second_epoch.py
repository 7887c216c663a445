"""A registered count that a step raises since the second epoch, before and behind its update.

It is the same on all ranks; one of them is lost right behind the first step that changes it.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Count:
    def __init__(self):
        self.before, self.behind = 0, [0.0]

    def state_dict(self):
        return {"before": self.before, "behind": list(self.behind)}

    def load_state_dict(self, state):
        self.before, self.behind = state["before"], list(state["behind"])


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(53)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(530 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    count = Count()
    ks = keepstep.attach(model, optimizer, count=count)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if epoch > 0:
            count.before += 1
        loss.backward()
        optimizer.step()
        if epoch > 0:
            count.behind[0] += 1.5
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, count=count.state_dict())


if __name__ == "__main__":
    main()
