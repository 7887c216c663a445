"""A module with get_extra_state: a Python number and a dictionary that decide what forward does.

The state is in state_dict but in neither parameters nor buffers, and changes in every forward pass.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class StochasticDepth(nn.Module):
    """Drops its branch more and more often, by the number of its own calls."""

    def __init__(self, body):
        super().__init__()
        self.body, self.calls, self.dropped = body, 0, {"yes": 0, "no": 0}

    def get_extra_state(self):
        return {"calls": self.calls, "dropped": dict(self.dropped)}

    def set_extra_state(self, state):
        self.calls, self.dropped = state["calls"], dict(state["dropped"])

    def forward(self, x):
        self.calls += 1
        scale = 1.0 / (1 + 0.1 * self.calls)
        kept = self.calls % 3 != 0
        self.dropped["no" if kept else "yes"] += 1
        return x + scale * self.body(x) * (1.0 if kept else 0.1)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(128)
    net = nn.Sequential(
        StochasticDepth(nn.Linear(16, 16)), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
    )
    model = DistributedDataParallel(net)
    torch.manual_seed(1280 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
