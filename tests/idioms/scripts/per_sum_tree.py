"""DQN with prioritized replay: a sum tree in lists, a target network with soft updates, epsilon decay, env object with its own RNG."""

# ranks: 2
import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


@dataclass
class Transition:
    s: Any
    a: int
    r: float
    s2: Any


class SumTree:
    def __init__(self, capacity):
        self.capacity = capacity
        self.tree = [0.0] * (2 * capacity - 1)
        self.data = [None] * capacity
        self.write = 0
        self.size = 0

    def add(self, p, data):
        idx = self.write + self.capacity - 1
        self.data[self.write] = data
        self.update(idx, p)
        self.write = (self.write + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def update(self, idx, p):
        change = p - self.tree[idx]
        self.tree[idx] = p
        while idx:
            idx = (idx - 1) // 2
            self.tree[idx] += change

    def get(self, s):
        idx = 0
        while 2 * idx + 1 < len(self.tree):
            left = 2 * idx + 1
            if s <= self.tree[left]:
                idx = left
            else:
                s -= self.tree[left]
                idx = left + 1
        return idx, self.data[idx - self.capacity + 1]


class Env:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.state = [0.0] * 4

    def step(self, a):
        self.state = [0.9 * v + self.rng.uniform(-0.1, 0.1) + 0.05 * a for v in self.state]
        return list(self.state), -abs(sum(self.state))


def main():
    job = relight.init()
    torch.manual_seed(8)
    q = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
    target = copy.deepcopy(q.module)
    opt = torch.optim.Adam(q.parameters(), 0.01)
    memory, env, eps, beta = SumTree(16), Env(job.rank), 1.0, 0.4
    training = relight.Training(model={"q": q, "target": target}, optimizer=opt)
    state = env.state
    for step in training.steps(until=14):
        with step:
            for _ in range(4):
                if random.random() < eps:
                    a = random.randrange(2)
                else:
                    with torch.no_grad():
                        a = int(q.module(torch.tensor(state)).argmax())
                nxt, r = env.step(a)
                memory.add(1.0, Transition(state, a, r, nxt))
                state = nxt
            eps = max(0.1, eps * 0.9)
            beta = min(1.0, beta + 0.05)
            batch = [memory.get(random.uniform(0, memory.tree[0] * 0.999)) for _ in range(4)]
            s = torch.tensor([t.s for _, t in batch])
            s2 = torch.tensor([t.s2 for _, t in batch])
            with torch.no_grad():
                y = torch.tensor([t.r for _, t in batch]) + 0.9 * target(s2).max(1).values
            w = torch.tensor([(memory.size * memory.tree[i] / memory.tree[0]) ** -beta for i, _ in batch])
            td = q(s).gather(1, torch.tensor([[t.a] for _, t in batch])).squeeze(1) - y
            (w * td.pow(2)).mean().backward()
            opt.step()
            opt.zero_grad()
            for (i, _), e in zip(batch, td.detach().abs().tolist()):
                memory.update(i, e + 0.01)
            for tp, p in zip(target.parameters(), q.parameters()):
                tp.data.copy_(0.9 * tp.data + 0.1 * p.data)
    finish(job, q=q, target=target, opt=opt, tree=memory.tree, eps=eps, state=state)


if __name__ == "__main__":
    main()
