"""An auxiliary head whose gradients are added up over three steps, and halved in each of them.

They are halved behind the other optimizer's update, while they are alive: what was published in the
fence is twice what the next step adds to.
"""

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1))
        self.main, self.aux = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.main(h), self.aux(h)


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(132)
    net = Net()
    model = DistributedDataParallel(net)
    torch.manual_seed(1320 + rank)
    opt_main = torch.optim.AdamW([*net.trunk.parameters(), *net.main.parameters()], lr=5e-3)
    opt_aux = torch.optim.SGD(net.aux.parameters(), lr=0.05, momentum=0.9)
    ks = keepstep.attach(model, {"main": opt_main, "aux": opt_aux})
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())

    @ks.step
    def train_step(x, y, step):
        out, aux = model(x)
        loss = nn.functional.cross_entropy(out, y) + 0.1 * (aux[:, 0] - x.norm(dim=1)).pow(2).mean()
        loss.backward()
        opt_main.step()
        opt_main.zero_grad()
        if step % 3 == 2:
            opt_aux.step()
            opt_aux.zero_grad()
        for parameter in net.aux.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return loss.item()

    losses, step = [], 0
    for epoch in ks.epochs(2):
        sampler.set_epoch(epoch)
        for x, y in ks.batches(loader):
            losses.append(train_step(x, y, step))
            step += 1
    zoolib.finish(args, losses, model=model, main=opt_main, aux=opt_aux, step=step,
                  gradients=[p.grad for p in net.aux.parameters()])  # fmt: skip


if __name__ == "__main__":
    main()
