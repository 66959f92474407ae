"""pytorch/examples' REINFORCE: lists that are attributes of the policy and emptied at an episode's end, a running reward,
returns from a deque, an environment with a stream of its own."""

# ranks: 2
from collections import deque
from itertools import count

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class CartPole:
    def __init__(self):
        self.np_random, self.state, self.steps_beyond_done = None, None, None

    def reset(self, seed=None):
        if seed is not None or self.np_random is None:
            self.np_random = np.random.Generator(np.random.PCG64(seed))
        self.state = self.np_random.uniform(low=-0.05, high=0.05, size=(4,))
        self.steps_beyond_done = None
        return np.array(self.state, dtype=np.float32), {}

    def step(self, action):
        x, x_dot, theta, theta_dot = self.state
        force = 10.0 if action == 1 else -10.0
        theta_acc = (9.8 * np.sin(theta) - np.cos(theta) * force / 1.1) / 0.6
        self.state = (x + 0.02 * x_dot, x_dot + 0.02 * force, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc)
        terminated = bool(abs(x) > 2.4 or abs(theta) > 0.2)
        reward = 1.0 if not terminated else 0.0
        return np.array(self.state, dtype=np.float32), reward, terminated, False, {}


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.dropout, self.affine2 = nn.Linear(4, 32), nn.Dropout(p=0.6), nn.Linear(32, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return torch.softmax(self.affine2(torch.relu(self.dropout(self.affine1(x)))), dim=1)


def select_action(state):
    probs = model(torch.from_numpy(state).float().unsqueeze(0))
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode():
    R = 0
    policy_loss = []
    returns = deque()
    for r in policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]


job = relight.init()
env = CartPole()
env.reset(seed=543 + job.rank)
torch.manual_seed(543)
policy = Policy()
model = DDP(policy, find_unused_parameters=True)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
eps = np.finfo(np.float32).eps.item()
training = relight.Training(model=model, optimizer=optimizer)
running_reward = 10
episodes = []
for step in training.steps(until=20):
    with step:
        state, _ = env.reset()
        ep_reward = 0
        for t in count(1):
            action = select_action(state)
            state, reward, done, _, _ = env.step(action)
            policy.rewards.append(reward)
            ep_reward += reward
            if done or t == 30:
                break
        running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
        finish_episode()
        episodes.append(t)
finish(job, policy=policy, optimizer=optimizer, running=running_reward, episodes=episodes, env=list(env.state))
