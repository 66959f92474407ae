"""Rainbow-like: n-step returns in deques, priorities in a segment tree that td-errors change after the write."""

# ranks: 2
from collections import deque, namedtuple

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

Transition = namedtuple("Transition", ("state", "action", "reward", "nonterminal"))
BLANK = Transition(np.zeros(3, np.float32), 0, 0.0, False)


class SegmentTree:
    def __init__(self, size):
        self.index, self.size, self.full = 0, size, False
        self.sum_tree = np.zeros((2 * size - 1,), dtype=np.float32)
        self.data = np.array([None] * size)
        self.max = 1

    def _propagate(self, index):
        parent = (index - 1) // 2
        left, right = 2 * parent + 1, 2 * parent + 2
        self.sum_tree[parent] = self.sum_tree[left] + self.sum_tree[right]
        if parent != 0:
            self._propagate(parent)

    def update(self, index, value):
        self.sum_tree[index] = value
        self._propagate(index)
        self.max = max(value, self.max)

    def append(self, data, value):
        self.data[self.index] = data
        self.update(self.index + self.size - 1, value)
        self.index = (self.index + 1) % self.size
        self.full = self.full or self.index == 0
        self.max = max(value, self.max)

    def find(self, value):
        index = 0
        while 2 * index + 1 < len(self.sum_tree):
            left, right = 2 * index + 1, 2 * index + 2
            if value <= self.sum_tree[left]:
                index = left
            else:
                value -= self.sum_tree[left]
                index = right
        return self.sum_tree[index], index - self.size + 1, index


class ReplayMemory:
    def __init__(self, capacity, n=2, gamma=0.9):
        self.capacity, self.n, self.gamma, self.t = capacity, n, gamma, 0
        self.priority_weight, self.priority_exponent = 0.4, 0.5
        self.transitions = SegmentTree(capacity)
        self.window = deque(maxlen=n)

    def append(self, state, action, reward, terminal):
        self.window.append((state, action, reward))
        if len(self.window) == self.n:
            R = sum(self.gamma**i * r for i, (_, _, r) in enumerate(self.window))
            first = self.window[0]
            self.transitions.append((Transition(first[0], first[1], R, not terminal), state), self.transitions.max)
        self.t = 0 if terminal else self.t + 1
        if terminal:
            self.window.clear()

    def sample(self, batch_size):
        total = self.transitions.sum_tree[0]
        segment = total / batch_size
        probs, idxs, tree_idxs = zip(
            *(self.transitions.find(np.random.uniform(i * segment, (i + 1) * segment)) for i in range(batch_size))
        )
        rows = [self.transitions.data[i] for i in idxs]
        capacity = self.capacity if self.transitions.full else self.transitions.index
        weights = (capacity * np.array(probs) / total) ** -self.priority_weight
        return tree_idxs, rows, torch.tensor(weights / weights.max(), dtype=torch.float32)

    def update_priorities(self, idxs, priorities):
        for idx, p in zip(idxs, np.power(priorities, self.priority_exponent)):
            self.transitions.update(idx, p)


class NoisyLinear(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight_mu = nn.Parameter(torch.empty(n_out, n_in).uniform_(-0.5, 0.5))
        self.weight_sigma = nn.Parameter(torch.full((n_out, n_in), 0.1))
        self.register_buffer("weight_epsilon", torch.empty(n_out, n_in))
        self.reset_noise()

    def reset_noise(self):
        self.weight_epsilon.copy_(torch.randn(self.weight_mu.size()))

    def forward(self, x):
        w = self.weight_mu + self.weight_sigma * self.weight_epsilon if self.training else self.weight_mu
        return nn.functional.linear(x, w)


class Agent:
    def __init__(self, job):
        torch.manual_seed(3)
        self.online_net = DDP(nn.Sequential(NoisyLinear(3, 16), nn.ReLU(), NoisyLinear(16, 3)), broadcast_buffers=False)
        self.target_net = nn.Sequential(NoisyLinear(3, 16), nn.ReLU(), NoisyLinear(16, 3))
        self.update_target_net()
        for param in self.target_net.parameters():
            param.requires_grad = False
        self.optimiser = torch.optim.Adam(self.online_net.parameters(), lr=1e-2, eps=1.5e-4)

    def reset_noise(self):
        for m in self.online_net.module.modules():
            if isinstance(m, NoisyLinear):
                m.reset_noise()

    def update_target_net(self):
        self.target_net.load_state_dict(self.online_net.module.state_dict())

    def act(self, state):
        with torch.no_grad():
            return self.online_net.module(torch.from_numpy(state)).argmax().item()

    def learn(self, mem):
        idxs, rows, weights = mem.sample(8)
        states = torch.stack([torch.from_numpy(r.state) for r, _ in rows])
        nexts = torch.stack([torch.from_numpy(s) for _, s in rows])
        actions = torch.tensor([r.action for r, _ in rows])
        returns = torch.tensor([r.reward for r, _ in rows], dtype=torch.float32)
        mask = torch.tensor([r.nonterminal for r, _ in rows], dtype=torch.float32)
        q = self.online_net(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.online_net.module(nexts).argmax(1, keepdim=True)
            y = returns + mask * 0.81 * self.target_net(nexts).gather(1, best).squeeze(1)
        td = y - q
        self.online_net.zero_grad()
        (weights * td.pow(2)).mean().backward()
        nn.utils.clip_grad_norm_(self.online_net.parameters(), 10)
        self.optimiser.step()
        mem.update_priorities(idxs, td.detach().abs().numpy())


def main():
    job = relight.init()
    dqn, mem = Agent(job), ReplayMemory(32)
    training = relight.Training(model={"online": dqn.online_net, "target": dqn.target_net}, optimizer=dqn.optimiser)
    rng, priority_increase = np.random.RandomState(job.rank), 0.6 / 16
    state, done, T = rng.randn(3).astype(np.float32), True, 0
    for step in training.steps(until=16):
        with step:
            for _ in range(9):
                if done:
                    state, done = rng.randn(3).astype(np.float32), False
                dqn.reset_noise()
                action = dqn.act(state)
                next_state = (0.9 * state + 0.2 * (action - 1) + 0.05 * rng.randn(3)).astype(np.float32)
                reward, done = -float(np.abs(next_state).sum()), rng.rand() < 0.1
                mem.append(state, action, max(min(reward, 1), -1), done)
                state, T = next_state, T + 1
            mem.priority_weight = min(mem.priority_weight + priority_increase, 1)
            dqn.learn(mem)
            if T % 36 == 0:
                dqn.update_target_net()
    finish(
        job,
        online=dqn.online_net,
        target=dqn.target_net,
        opt=dqn.optimiser,
        tree=mem.transitions.sum_tree,
        state=state,
        T=T,
        beta=mem.priority_weight,
        rng=rng.rand(),
    )


if __name__ == "__main__":
    main()
