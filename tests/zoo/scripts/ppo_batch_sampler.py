"""PPO minibatches: `for i in BatchSampler(SubsetRandomSampler(range(n)), 8, drop_last=True)`.

Several epochs over one roll-out, without a loader: the loop runs over torch's own generator.
"""

import torch
import zoolib
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, SubsetRandomSampler

import keepstep


def main():
    args, rank, _ = zoolib.start()
    zoolib.seed_everything(571)
    model = DistributedDataParallel(zoolib.mlp(16, 32, 4, dropout=0.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    ks = keepstep.attach(model, optimizer)
    zoolib.seed_everything(5710 + rank)

    @ks.step
    def update(obs, actions, old, advantages):
        log = model(obs).log_softmax(1).gather(1, actions[:, None])[:, 0]
        ratio = (log - old).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = []
    for _iteration in range(2):
        obs = torch.randn(32, 16)
        with torch.no_grad():
            dist = torch.distributions.Categorical(logits=model.module(obs))
            actions = dist.sample()
            old = dist.log_prob(actions)
        rewards = (actions == obs[:, :4].argmax(1)).float()
        advantages = rewards - rewards.mean()
        for _ in range(2):
            sampler = BatchSampler(SubsetRandomSampler(range(32)), 8, drop_last=True)
            for i in sampler:
                losses.append(update(obs[i], actions[i], old[i], advantages[i]))
    zoolib.finish(args, losses, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
