"""The word language model example: truncated backpropagation through time.

The hidden state is carried from step to step, detached, in a variable of the loop; each rank has
its own, and it begins anew with every epoch. The learning rate is divided by hand.
"""

import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class RNNModel(nn.Module):
    def __init__(self, words=32, width=16):
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        self.drop = nn.Dropout(0.2)
        self.rnn = nn.LSTM(width, width)
        self.decoder = nn.Linear(width, words)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return self.decoder(self.drop(out)), hidden

    def init_hidden(self, batch):
        return torch.zeros(1, batch, 16), torch.zeros(1, batch, 16)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(134)
    corpus = torch.from_numpy(zoolib.text(2 * 4 * 65)).view(world, 4, -1)[rank].t().contiguous()
    net = RNNModel()
    model = DistributedDataParallel(net)
    torch.manual_seed(1340 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    ks = keepstep.attach(model, optimizer)

    @ks.step
    def train_step(data, targets, hidden):
        model.zero_grad()
        output, hidden = model(data, hidden)
        loss = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.item(), repackage_hidden(hidden)

    @ks.section
    def evaluate():
        with torch.no_grad():
            output, _ = net.eval()(corpus[:-1], net.init_hidden(4))
            loss = nn.functional.cross_entropy(output.flatten(0, 1), corpus[1:].flatten())
        dist.all_reduce(loss)
        net.train()
        return loss.item()

    losses, best_val_loss = [], None
    for _ in ks.epochs(2):
        hidden = net.init_hidden(4)
        for i in range(0, len(corpus) - 1, 8):
            loss, hidden = train_step(corpus[i : i + 8], corpus[i + 1 : i + 9], hidden)
            losses.append(loss)
        val_loss = evaluate()
        if not best_val_loss or val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            optimizer.param_groups[0]["lr"] /= 4.0
    zoolib.finish(args, losses, model=model, optimizer=optimizer, hidden=hidden, best=best_val_loss)


if __name__ == "__main__":
    main()
