"""A loader with state_dict and load_state_dict, in the manner of torchdata's StatefulDataLoader.

Its state holds the place in a packed stream, what is left of the last document and the state of
its generator.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class PackedLoader:
    def __init__(self, documents, rank, length=16, batches=8):
        self.documents, self.length, self.count = documents, length, batches
        self.generator = torch.Generator().manual_seed(rank)
        self.rest, self.served = torch.empty(0, dtype=torch.long), 0

    def state_dict(self):
        generator = self.generator.get_state()
        return {"generator": generator, "rest": self.rest.clone(), "served": self.served}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.rest, self.served = state["rest"].clone(), state["served"]

    def __len__(self):
        return self.count

    def __iter__(self):
        while self.served < self.count:
            while len(self.rest) < 4 * (self.length + 1):
                pick = torch.randint(len(self.documents), (), generator=self.generator)
                self.rest = torch.cat([self.rest, self.documents[int(pick)]])
            rows, self.rest = self.rest[: 4 * (self.length + 1)], self.rest[4 * self.length :]
            self.served += 1
            yield rows.view(4, self.length + 1)
        self.served = 0


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(127)
    documents = torch.from_numpy(zoolib.text(2000)).split([100, 300, 50, 550, 400, 600])
    net = nn.Sequential(nn.Embedding(32, 16), nn.Dropout(0.1), nn.Linear(16, 32))
    model = DistributedDataParallel(net)
    torch.manual_seed(1270 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ks = keepstep.attach(model, optimizer)
    loader = PackedLoader(documents, rank)

    @ks.step
    def train_step(rows):
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        for i, rows in enumerate(ks.batches(loader)):
            losses.append(train_step(rows))
            print(f"{epoch} {i + 1}/{len(loader)}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer, loader=loader.state_dict())


if __name__ == "__main__":
    main()
