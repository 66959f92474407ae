"""DQN: a replay buffer of this rank's own transitions, an environment with a state, epsilon by the step, a target network.

Buffer and environment are the rank's own and grow in every step; handed over as per_rank with state_dict. The target
network is copied every few steps after the write.
"""

import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *transition):
        self.memory.append(transition)

    def sample(self, batch_size):
        return [torch.stack(part) for part in zip(*random.sample(self.memory, batch_size))]

    def __len__(self):
        return len(self.memory)

    def state_dict(self):
        return {"memory": [list(t) for t in self.memory]}

    def load_state_dict(self, state):
        self.memory.clear()
        self.memory.extend(tuple(t) for t in state["memory"])


class Env:
    def __init__(self):
        self.s = torch.zeros(3)

    def step(self, action):
        before = self.s.clone()
        self.s = torch.clamp(self.s + 0.3 * (action.float() - 1) + 0.05 * torch.randn(3), -1, 1)
        return before, self.s.clone(), -self.s.pow(2).sum()

    def state_dict(self):
        return {"s": self.s}

    def load_state_dict(self, state):
        self.s = state["s"].clone()


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(3, 24), nn.Linear(24, 3)

    def forward(self, x):
        return self.layer2(F.relu(self.layer1(x)))


if __name__ == "__main__":
    BATCH_SIZE, GAMMA, TARGET_UPDATE = 8, 0.9, 5
    job = relight.init()
    torch.manual_seed(0)
    policy_net = DDP(DQN())
    target_net = DQN()
    target_net.load_state_dict(policy_net.module.state_dict())
    target_net.eval()
    optimizer = torch.optim.RMSprop(policy_net.parameters())
    memory, env = ReplayMemory(200), Env()
    training = relight.Training(
        model={"policy": policy_net, "target": target_net},
        optimizer=optimizer,
        per_rank={"memory": memory, "env": env},
    )
    for step in training.steps(until=20):
        with step:
            eps = 0.1 + 0.8 * 0.9**step.number
            for _ in range(10):
                with torch.no_grad():
                    greedy = policy_net.module(env.s).argmax()
                action = torch.randint(0, 3, ()) if random.random() < eps else greedy
                state, next_state, reward = env.step(action)
                memory.push(state, action, next_state, reward)
            s, a, s2, r = memory.sample(BATCH_SIZE)
            q = policy_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
            with torch.no_grad():
                expected = r + GAMMA * target_net(s2).max(1).values
            loss = F.smooth_l1_loss(q, expected)
            optimizer.zero_grad()
            loss.backward()
            for param in policy_net.parameters():
                param.grad.data.clamp_(-1, 1)
            optimizer.step()
            if step.number % TARGET_UPDATE == 0:
                target_net.load_state_dict(policy_net.module.state_dict())
    finish(job, policy=policy_net, target=target_net, optimizer=optimizer, memory=memory, env=env)
