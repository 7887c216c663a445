"""A DQN: replay buffer in a deque, target network copied every few steps, epsilon-greedy.

The buffer, epsilon and the frame counter are Python state that the training depends on; actions
and minibatches are drawn with `random`; the target network is attached by nobody.
"""

import copy
import random
from collections import deque, namedtuple

import torch
import zoolib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

Transition = namedtuple("Transition", "state action reward next_state")


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return Transition(*zip(*random.sample(self.memory, batch_size)))


class Walk:
    """An environment: walk to the origin."""

    def reset(self):
        self.position = torch.randn(4)
        return self.position

    def step(self, action):
        self.position = self.position + 0.1 * (torch.arange(4) == action).float()
        return self.position, -self.position.norm()


def main():
    args, rank, _ = zoolib.start()
    torch.manual_seed(23)
    policy_net = DistributedDataParallel(zoolib.mlp(4, 24, 4, dropout=0.0))
    target_net = copy.deepcopy(policy_net.module)
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=5e-3, amsgrad=True)
    ks = keepstep.attach(policy_net, optimizer)
    zoolib.seed_everything(230 + rank)
    memory, env = ReplayMemory(64), Walk()
    state, steps_done, losses = env.reset(), 0, []

    def select_action(state):
        if random.random() < max(0.1, 0.9 - 0.02 * steps_done):
            return random.randrange(4)
        with torch.no_grad():
            return int(policy_net.module(state).argmax())

    @ks.step
    def optimize_model():
        batch = memory.sample(8)
        actions = torch.tensor(batch.action)[:, None]
        values = policy_net(torch.stack(batch.state)).gather(1, actions)[:, 0]
        with torch.no_grad():
            following = target_net(torch.stack(batch.next_state)).max(1).values
        loss = nn.functional.smooth_l1_loss(values, torch.stack(batch.reward) + 0.9 * following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for frame in range(24):
        action = select_action(state)
        steps_done += 1
        next_state, reward = env.step(action)
        memory.push(state, action, reward, next_state)
        state = next_state
        if len(memory.memory) >= 9:
            losses.append(optimize_model())
            if frame % 4 == 0:
                target_net.load_state_dict(policy_net.module.state_dict())
    zoolib.finish(args, losses, policy=policy_net, target=target_net, optimizer=optimizer,
                  memory=[list(t) for t in memory.memory], steps_done=steps_done)  # fmt: skip


if __name__ == "__main__":
    main()
