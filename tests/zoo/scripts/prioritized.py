"""Prioritised replay: a sum tree in a numpy array, its data in an array of objects, beta annealed.

`self.data = np.zeros(capacity, dtype=object)` holds the transitions, as the usual sum tree does.
"""

import numpy as np
import torch
import zoolib
from torch.nn.parallel import DistributedDataParallel

import keepstep


class SumTree:
    write = 0

    def __init__(self, capacity):
        self.capacity = capacity
        self.tree = np.zeros(2 * capacity - 1)
        self.data = np.zeros(capacity, dtype=object)
        self.n_entries = 0

    def _propagate(self, idx, change):
        parent = (idx - 1) // 2
        self.tree[parent] += change
        if parent != 0:
            self._propagate(parent, change)

    def _retrieve(self, idx, s):
        left = 2 * idx + 1
        if left >= len(self.tree):
            return idx
        return (
            self._retrieve(left, s)
            if s <= self.tree[left]
            else self._retrieve(left + 1, s - self.tree[left])
        )

    def add(self, p, data):
        idx = self.write + self.capacity - 1
        self.data[self.write] = data
        self.update(idx, p)
        self.write = (self.write + 1) % self.capacity
        self.n_entries = min(self.n_entries + 1, self.capacity)

    def update(self, idx, p):
        change = p - self.tree[idx]
        self.tree[idx] = p
        self._propagate(idx, change)

    def get(self, s):
        idx = self._retrieve(0, s)
        return idx, self.tree[idx], self.data[idx - self.capacity + 1]


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(525)
    model = DistributedDataParallel(zoolib.mlp(4, 24, 4, dropout=0.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    zoolib.seed_everything(5250 + rank)
    memory, beta, losses = SumTree(16), 0.4, []
    state = np.random.randn(4).astype(np.float32)

    @ks.step
    def optimize(batch, weights):
        states, actions, rewards, following = map(np.stack, zip(*batch))
        q = model(torch.from_numpy(states)).gather(1, torch.from_numpy(actions)[:, None])[:, 0]
        with torch.no_grad():
            target = (
                torch.from_numpy(rewards)
                + 0.9 * model.module(torch.from_numpy(following)).max(1).values
            )
        error = target - q
        loss = (torch.from_numpy(weights) * error**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item(), error.detach().abs().numpy()

    for frame in range(26):
        action = np.random.randint(4)
        following = (state + 0.1 * np.eye(4)[action] + 0.05 * np.random.randn(4)).astype(np.float32)
        memory.add(
            1.0, (state, np.int64(action), np.float32(-np.linalg.norm(following)), following)
        )
        state = following
        if frame >= 10:
            total = memory.tree[0]
            found = [
                memory.get(np.random.uniform(i * total / 8, (i + 1) * total / 8)) for i in range(8)
            ]
            beta = min(1.0, beta + 0.02)
            weights = np.array(
                [(memory.n_entries * p / total) ** -beta for _, p, _ in found], dtype=np.float32
            )
            loss, errors = optimize([data for _, _, data in found], weights / weights.max())
            for (idx, _, _), e in zip(found, errors):
                memory.update(idx, (float(e) + 1e-2) ** 0.6)
            losses.append(loss)
    zoolib.finish(
        args,
        losses,
        model=model,
        optimizer=optimizer,
        tree=memory.tree,
        beta=beta,
        write=memory.write,
        data=list(memory.data),
    )


if __name__ == "__main__":
    main()
