"""Off-policy learning from a replay buffer of numpy arrays, a ring that is written in place.

Arrays have no version counter. The buffer is far larger than a batch, and the positions that are
drawn depend on how full it is.
"""

import numpy as np
import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Replay:
    def __init__(self, size, dim):
        self.states = np.zeros((size, dim), dtype=np.float32)
        self.rewards = np.zeros(size, dtype=np.float32)
        self.at, self.full = 0, False

    def add(self, state, reward):
        self.states[self.at], self.rewards[self.at] = state, reward
        self.at += 1
        if self.at == len(self.states):
            self.at, self.full = 0, True

    def sample(self, n):
        index = np.random.randint(0, len(self.states) if self.full else self.at, n)
        return torch.from_numpy(self.states[index]), torch.from_numpy(self.rewards[index])


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(71)
    model = DistributedDataParallel(zoolib.mlp(out=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ks = keepstep.attach(model, optimizer)
    zoolib.seed_everything(710 + rank)
    replay = Replay(4096, 16)

    @ks.step
    def train_step():
        states, rewards = replay.sample(16)
        loss = nn.functional.mse_loss(model(states).squeeze(1), rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        replay.add(states[0].numpy() + 0.1, loss.item())
        return loss.item()

    losses = []
    for _ in ks.batches(range(14)):
        for _ in range(3):
            state = np.random.standard_normal(16)
            replay.add(state, float(state.sum()))
        losses.append(train_step())
    zoolib.finish(args, losses, model=model, optimizer=optimizer,
                  states=torch.from_numpy(replay.states), at=replay.at)  # fmt: skip


if __name__ == "__main__":
    main()
