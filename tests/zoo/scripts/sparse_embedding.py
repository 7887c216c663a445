"""An embedding with sparse gradients and SparseAdam, beside AdamW for the rest.

Gradients are sparse tensors, and the optimizer's state is dense.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(64, 16, sparse=True)
        self.fc = zoolib.mlp(16, 24, 32)

    def forward(self, x):
        return self.fc(self.embed(x))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(135)
    net = Net()
    model = DistributedDataParallel(net)
    torch.manual_seed(1350 + rank)
    sparse = torch.optim.SparseAdam(net.embed.parameters(), lr=1e-2)
    dense = torch.optim.AdamW(net.fc.parameters(), lr=5e-3)
    ks = keepstep.attach(model, [sparse, dense])
    data = torch.from_numpy(zoolib.text(1152)).view(128, 9)
    loader, sampler = zoolib.sharded_loader(data)

    @ks.step
    def train_step(batch):
        sparse.zero_grad()
        dense.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :8]), batch[:, 8])
        loss.backward()
        sparse.step()
        dense.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for batch in ks.batches(loader):
            losses.append(train_step(batch))
    zoolib.finish(args, losses, model=model, sparse=sparse, dense=dense)


if __name__ == "__main__":
    main()
