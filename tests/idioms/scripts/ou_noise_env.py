"""An environment and a noise process with state of their own, in NumPy: deterministic policy gradients."""

# ranks: 2
import copy
import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class OUNoise:
    def __init__(self, size, seed, mu=0.0, theta=0.15, sigma=0.2):
        self.mu, self.theta, self.sigma = mu * np.ones(size), theta, sigma
        self.seed = random.seed(seed)
        self.reset()

    def reset(self):
        self.state = copy.copy(self.mu)

    def sample(self):
        x = self.state
        dx = self.theta * (self.mu - x) + self.sigma * np.array([random.random() for i in range(len(x))])
        self.state = x + dx
        return self.state


class Env:
    def __init__(self, seed):
        self.np_random = np.random.RandomState(seed)
        self.state = None
        self.elapsed = 0

    def reset(self):
        self.state = self.np_random.uniform(-1, 1, size=3)
        self.elapsed = 0
        return self.state.astype(np.float32)

    def step(self, action):
        self.state = 0.9 * self.state + 0.1 * action + self.np_random.normal(0, 0.01, 3)
        self.elapsed += 1
        done = bool(self.elapsed >= 4)
        return self.state.astype(np.float32), -float((self.state**2).sum()), done, {}


def main():
    job = relight.init()
    torch.manual_seed(131)
    env = Env(10 + job.rank)
    noise = OUNoise(3, job.rank)
    actor = DDP(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh()))
    critic = DDP(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
    target = copy.deepcopy(critic.module)
    a_opt, c_opt = torch.optim.Adam(actor.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
    memory = deque(maxlen=int(40))
    state, scores, score = env.reset(), [], 0.0
    training = relight.Training(
        model={"actor": actor, "critic": critic, "target": target}, optimizer={"a": a_opt, "c": c_opt}
    )
    for step in training.steps(until=16):
        with step:
            for _ in range(3):
                with torch.no_grad():
                    action = actor.module(torch.from_numpy(state)).numpy() + noise.sample().astype(np.float32)
                following, reward, done, _ = env.step(action)
                memory.append((state, action, reward, following, done))
                state = following
                score += reward
                if done:
                    scores.append(score)
                    score = 0.0
                    state = env.reset()
                    noise.reset()
            s, a, r, n, d = (np.vstack(z) for z in zip(*random.choices(memory, k=6)))
            s, a, n = map(torch.from_numpy, (s, a, n))
            with torch.no_grad():
                q = torch.tensor(r).float() + 0.9 * target(torch.cat([n, actor.module(n)], 1)) * (
                    1 - torch.tensor(d).float()
                )
            c_opt.zero_grad()
            F.mse_loss(critic(torch.cat([s, a], 1)), q).backward()
            c_opt.step()
            a_opt.zero_grad()
            (-critic.module(torch.cat([s, actor(s)], 1)).mean()).backward()
            a_opt.step()
            for t, p in zip(target.parameters(), critic.module.parameters(), strict=True):
                t.data.copy_(0.1 * p.data + 0.9 * t.data)
    finish(job, actor=actor, critic=critic, target=target, scores=scores, score=score, state=state, n=noise.state)


if __name__ == "__main__":
    main()
