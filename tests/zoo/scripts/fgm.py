"""FGM: adversarial training that adds to the embedding through `param.data` and takes it back.

`param.data.add_` leaves the version counter as it is; a backup dictionary holds the true weights
while the second backward pass runs.
"""

import torch
import zoolib
from torch import nn

import keepstep


class FGM:
    def __init__(self, model):
        self.model = model
        self.backup = {}

    def attack(self, epsilon=0.5, emb_name="embed"):
        for name, param in self.model.named_parameters():
            if param.requires_grad and emb_name in name:
                self.backup[name] = param.data.clone()
                norm = torch.norm(param.grad)
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                if norm != 0:
                    param.data.add_(param.grad * (epsilon / norm.item()))

    def restore(self, emb_name="embed"):
        for name, param in self.model.named_parameters():
            if param.requires_grad and emb_name in name:
                param.data.copy_(self.backup[name])
        self.backup = {}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.fc = zoolib.mlp(16, 32, 32)

    def forward(self, x):
        return self.fc(self.embed(x).mean(1))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(44)
    data = torch.from_numpy(zoolib.text(1152)).view(128, 9)
    model = zoolib.spread(Classifier(), args)
    torch.manual_seed(440 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(data)
    fgm = FGM(model)

    @ks.step
    def train_step(batch):
        inputs, labels = batch[:, :8], batch[:, 8]
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        fgm.attack()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        fgm.restore()
        optimizer.step()
        model.zero_grad()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for i, batch in enumerate(ks.batches(loader)):
            losses.append(train_step(batch))
            if i % 4 == 0:
                print(f"epoch {epoch} step {i} loss {losses[-1]:.4f}")
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
