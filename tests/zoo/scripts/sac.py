"""SAC: twin critics with targets by Polyak averaging, an actor, and an automatic temperature.

Three steps in a round; log_alpha is a plain tensor with an optimizer of its own, whose gradient the
script reduces; targets follow by torch._foreach_lerp_ between the steps.
"""

import copy

import numpy as np
import torch
import torch.distributed as dist
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1, self.q2 = zoolib.mlp(6, 24, 1, 0.0), zoolib.mlp(6, 24, 1, 0.0)

    def forward(self, s, a):
        x = torch.cat([s, a], 1)
        return self.q1(x)[:, 0], self.q2(x)[:, 0]


class Buffer:
    def __init__(self, size):
        self.s, self.a = np.zeros((size, 4), np.float32), np.zeros((size, 2), np.float32)
        self.r, self.n = np.zeros(size, np.float32), np.zeros((size, 4), np.float32)
        self.ptr, self.size, self.max_size = 0, 0, size

    def store(self, s, a, r, n):
        self.s[self.ptr], self.a[self.ptr], self.r[self.ptr], self.n[self.ptr] = s, a, r, n
        self.ptr = (self.ptr + 1) % self.max_size
        self.size = min(self.size + 1, self.max_size)

    def sample(self, n):
        i = np.random.randint(0, self.size, n)
        return [torch.as_tensor(x[i]) for x in (self.s, self.a, self.r, self.n)]


def main():
    args, rank, world = zoolib.start()
    zoolib.seed_everything(601)
    actor = DistributedDataParallel(zoolib.mlp(4, 24, 4, 0.0))
    critic = DistributedDataParallel(Twin())
    target = copy.deepcopy(critic.module)
    for p in target.parameters():
        p.requires_grad = False
    log_alpha = torch.zeros(1, requires_grad=True)
    pi_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    q_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=3e-3)
    ks = keepstep.attach([actor, critic], [pi_optimizer, q_optimizer, alpha_optimizer])
    zoolib.seed_everything(6010 + rank)
    buffer, state, losses = Buffer(24), np.random.randn(4).astype(np.float32), []

    def policy(s):
        mean, log_std = actor(s).chunk(2, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-3, 1).exp())
        u = normal.rsample()
        a = torch.tanh(u)
        return a, (normal.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)).sum(1)

    @ks.step
    def update_critic(s, a, r, n):
        with torch.no_grad():
            na, logp = policy(n)
            q = torch.min(*target(n, na)) - log_alpha.exp() * logp
        q1, q2 = critic(s, a)
        loss = ((q1 - r - 0.9 * q) ** 2 + (q2 - r - 0.9 * q) ** 2).mean()
        q_optimizer.zero_grad()
        loss.backward()
        q_optimizer.step()
        return loss.item()

    @ks.step
    def update_actor(s):
        for p in critic.parameters():
            p.requires_grad = False
        a, logp = policy(s)
        loss = (log_alpha.detach().exp() * logp - torch.min(*critic.module(s, a))).mean()
        pi_optimizer.zero_grad()
        loss.backward()
        for p in critic.parameters():
            p.requires_grad = True
        alpha_loss = -(log_alpha * (logp.detach() - 2).mean()).sum()
        alpha_optimizer.zero_grad()
        alpha_loss.backward()
        dist.all_reduce(log_alpha.grad)
        log_alpha.grad.div_(world)
        pi_optimizer.step()
        alpha_optimizer.step()
        return loss.item()

    for frame in range(20):
        with torch.no_grad():
            action = policy(torch.from_numpy(state)[None])[0][0].numpy()
        following = (0.9 * state + 0.1 * np.random.randn(4)).astype(np.float32)
        following[:2] += 0.1 * action
        buffer.store(state, action, -np.abs(following).sum(), following)
        state = following
        if frame >= 10:
            batch = buffer.sample(8)
            losses.append(update_critic(*batch))
            losses.append(update_actor(batch[0]))
            with torch.no_grad():
                torch._foreach_lerp_(
                    list(target.parameters()), list(critic.module.parameters()), 0.05
                )
    zoolib.finish(
        args,
        losses,
        actor=actor,
        critic=critic,
        target=target,
        log_alpha=log_alpha,
        pi=pi_optimizer,
        q=q_optimizer,
        a=alpha_optimizer,
        buffer=vars(buffer),
    )


if __name__ == "__main__":
    main()
