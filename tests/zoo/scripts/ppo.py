"""PPO: a rollout is collected, then several epochs of shuffled minibatches go over it.

The rollout is data that the policy itself made between steps; environment, running statistics of
rewards and the shuffles are state of the script.
"""

import torch
import zoolib
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

import keepstep


class Environment:
    def __init__(self, count):
        self.state = torch.randn(count, 4)

    def step(self, actions):
        move = nn.functional.one_hot(actions, 4).float() - 0.25
        self.state = 0.95 * self.state + 0.3 * move + 0.05 * torch.randn_like(self.state)
        return self.state, -self.state.abs().sum(1)


class RunningMean:
    def __init__(self):
        self.mean, self.count = 0.0, 1e-4

    def update(self, values):
        self.count += len(values)
        self.mean += (values.mean().item() - self.mean) * len(values) / self.count


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(132)
    agent = DistributedDataParallel(zoolib.mlp(4, 24, 5, dropout=0.0))
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
    ks = keepstep.attach(agent, optimizer)
    zoolib.seed_everything(1320 + rank)
    env, scale = Environment(4), RunningMean()

    @ks.step
    def update(obs, actions, old_logprobs, returns):
        out = agent(obs)
        policy, values = Categorical(logits=out[:, :4]), out[:, 4]
        ratio = (policy.log_prob(actions) - old_logprobs).exp()
        advantages = returns - values.detach()
        clipped = ratio.clamp(0.8, 1.2) * advantages
        loss = -torch.min(ratio * advantages, clipped).mean()
        loss = loss + 0.5 * (returns - values).pow(2).mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    losses = []
    for iteration in range(2):
        optimizer.param_groups[0]["lr"] = (1.0 - iteration / 2) * 3e-3
        rollout, obs = [], env.state
        for _ in range(4):
            with torch.no_grad():
                policy = Categorical(logits=agent.module(obs)[:, :4])
            actions = policy.sample()
            following, rewards = env.step(actions)
            scale.update(rewards)
            rollout.append((obs, actions, policy.log_prob(actions), rewards - scale.mean))
            obs = following
        batch = [torch.cat(column) for column in zip(*rollout)]
        for _ in range(2):
            for index in torch.randperm(len(batch[0])).split(4):
                losses.append(update(*(column[index] for column in batch)))
    zoolib.finish(args, losses, agent=agent, optimizer=optimizer, state=env.state,
                  scale=[scale.mean, scale.count])  # fmt: skip


if __name__ == "__main__":
    main()
