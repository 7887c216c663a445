"""A graph network over a sparse adjacency matrix, with edges dropped by hand in every step.

Sparse tensors are among the script's variables, the step's locals and the model's arguments.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, adjacency, x):
        hidden = torch.sparse.mm(adjacency, self.first(x)).relu()
        return torch.sparse.mm(adjacency, self.second(hidden))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(40)
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = zoolib.vectors()
    features, labels = data.tensors
    near = torch.cdist(features, features) < 4.5
    adjacency = (near / near.sum(1, keepdim=True)).to_sparse()
    torch.manual_seed(400 + rank)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(data)

    @ks.step
    def train_step(nodes):
        kept = torch.rand(adjacency.values().shape) < 0.9
        dropped = torch.sparse_coo_tensor(
            adjacency.indices()[:, kept], adjacency.values()[kept], adjacency.shape
        )
        output = model(dropped, features)[nodes]
        loss = nn.functional.cross_entropy(output, labels[nodes])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, _ in ks.batches(loader):
            nodes = (features[:, None] == x).all(2).nonzero()[:, 0]
            losses.append(train_step(nodes))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
