"""nanoGPT's loop in a function, with batches from a generator of the rank's own.

The `torch.Generator` is a local of `main`, the learning rate is a function of a local counter, and
evaluation draws from the same generator.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, world = zoolib.start()
    torch.manual_seed(3)
    data = torch.from_numpy(zoolib.text())
    net = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ks = keepstep.attach(model, optimizer)
    g = torch.Generator()
    g.manual_seed(100 + rank)

    def get_batch():
        ix = torch.randint(len(data) - 9, (4,), generator=g)
        return torch.stack([data[i : i + 8] for i in ix]), torch.stack(
            [data[i + 1 : i + 9] for i in ix]
        )

    @ks.step
    def train_step(x, y):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    @ks.section
    def estimate_loss():
        with torch.no_grad():
            x, y = get_batch()
            loss = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
        dist.all_reduce(loss)
        return loss.item() / world

    losses, evaluations = [], []
    for it in range(16):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (it + 1) / 4) * (1 - it / 20)
        if it % 5 == 0:
            evaluations.append(estimate_loss())
        losses.append(train_step(*get_batch()))
    zoolib.finish(args, losses, model=model, optimizer=optimizer, evaluations=evaluations,
                  generator=g.get_state())  # fmt: skip


if __name__ == "__main__":
    main()
