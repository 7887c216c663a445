"""Features that each rank extracts from data of its own at the start of an epoch, and trains with.

The result of the section is large and another one on every rank: no replica's can stand in for it.
"""

import torch
import zoolib
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(38)
    model = DistributedDataParallel(zoolib.mlp(out=192))
    torch.manual_seed(380 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ks = keepstep.attach(model, optimizer)
    data = zoolib.vectors()
    loader, sampler = zoolib.sharded_loader(data)
    own = data.tensors[0][rank::2].repeat(2, 1)

    @ks.section
    def extract():
        model.eval()
        with torch.no_grad():
            features = model.module(own)
        model.train()
        return features

    @ks.step
    def train_step(x, y):
        loss = (model(x) - features[y].mean(0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    features, losses = None, []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        features = extract()
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
