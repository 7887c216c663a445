"""nanoGPT: `while True`, batches drawn from one long array, learning rate set by hand.

Micro-steps toggle `require_backward_grad_sync`, the next batch is drawn inside the step while the
gradients are computed and lives in a variable between steps, and `iter_num` is a plain counter.
"""

import math

import torch
import zoolib
from torch import nn

import keepstep

block_size, batch_size, vocab = 8, 4, 32
gradient_accumulation_steps, max_iters, warmup_iters = 2, 14, 4
learning_rate, min_lr, grad_clip = 1e-2, 1e-3, 1.0


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.attention = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.proj(y))


class GPT(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block_size, width)
        self.h0, self.h1 = Block(), Block()
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.h1(self.h0(x)))
        return nn.functional.cross_entropy(logits.view(-1, vocab), targets.view(-1))


def get_batch(data):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size]) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size]) for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


args, rank, world = zoolib.start()
zoolib.seed_everything(1337)
data = zoolib.text(words=vocab)
model = zoolib.spread(GPT(), args)
torch.manual_seed(1337 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
ks = keepstep.attach(model, optimizer)
X, Y = get_batch(data)


@ks.step
def train_step():
    global X, Y
    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        if args.fsdp:
            model.set_requires_gradient_sync(last)
        else:
            model.require_backward_grad_sync = last
        loss = model(X, Y) / gradient_accumulation_steps
        X, Y = get_batch(data)  # prefetch
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item() * gradient_accumulation_steps


iter_num, losses = 0, []
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    lossf = train_step()
    losses.append(lossf)
    if iter_num % 5 == 0 and rank == 0:
        print(f"iter {iter_num}: loss {lossf:.4f}")
    iter_num += 1
    if iter_num >= max_iters:
        break
zoolib.finish(args, losses, model=model, optimizer=optimizer, x=X, iter_num=iter_num)
