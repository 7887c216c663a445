"""PGD: several adversarial passes over the embedding with backups of weights and gradients.

Weights and gradients are put aside and back inside the step; the attacker's backups are attributes
of an object that outlives it.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class PGD:
    def __init__(self, model):
        self.model, self.emb_backup, self.grad_backup = model, {}, {}

    def attack(self, epsilon=0.3, alpha=0.1, is_first_attack=False):
        for name, param in self.model.named_parameters():
            if "embed" in name:
                if is_first_attack:
                    self.emb_backup[name] = param.data.clone()
                norm = torch.norm(param.grad)
                if norm != 0:
                    param.data.add_(alpha * param.grad / norm)
                    r = param.data - self.emb_backup[name]
                    if torch.norm(r) > epsilon:
                        r = epsilon * r / torch.norm(r)
                    param.data = self.emb_backup[name] + r

    def restore(self):
        for name, param in self.model.named_parameters():
            if "embed" in name:
                param.data = self.emb_backup[name]

    def backup_grad(self):
        for name, param in self.model.named_parameters():
            self.grad_backup[name] = param.grad.clone()

    def restore_grad(self):
        for name, param in self.model.named_parameters():
            param.grad = self.grad_backup[name]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.fc = zoolib.mlp(16, 24, 32)

    def forward(self, x):
        return self.fc(self.embed(x).mean(1))


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(45)
    data = torch.from_numpy(zoolib.text(1152)).view(128, 9)
    model = DistributedDataParallel(Classifier())
    torch.manual_seed(450 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    loader, sampler = zoolib.sharded_loader(data)
    pgd, K = PGD(model), 2

    @ks.step
    def train_step(batch):
        x, y = batch[:, :8], batch[:, 8]
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        pgd.backup_grad()
        for t in range(K):
            pgd.attack(is_first_attack=(t == 0))
            if t != K - 1:
                model.zero_grad()
            else:
                pgd.restore_grad()
            nn.functional.cross_entropy(model(x), y).backward()
        pgd.restore()
        optimizer.step()
        model.zero_grad()
        return loss.item()

    losses = []
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for batch in ks.batches(loader):
            losses.append(train_step(batch))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
