"""Evolution strategies with a shared noise table, antithetic pairs, centered ranks, and an Adam in NumPy over one vector."""

# ranks: 3
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


class SharedNoiseTable:
    def __init__(self, count=5000, seed=123):
        self.noise = np.random.RandomState(seed).randn(count).astype(np.float32)

    def get(self, i, dim):
        return self.noise[i : i + dim]

    def sample_index(self, stream, dim):
        return stream.randint(0, len(self.noise) - dim + 1)


class Optimizer:
    def __init__(self, theta):
        self.theta, self.dim, self.t = theta, len(theta), 0

    def update(self, globalg):
        self.t += 1
        step = self._compute_step(globalg)
        ratio = np.linalg.norm(step) / np.linalg.norm(self.theta)
        self.theta = self.theta + step
        return ratio


class Adam(Optimizer):
    def __init__(self, theta, stepsize, beta1=0.9, beta2=0.999):
        super().__init__(theta)
        self.stepsize, self.beta1, self.beta2 = stepsize, beta1, beta2
        self.m, self.v = np.zeros(self.dim, dtype=np.float32), np.zeros(self.dim, dtype=np.float32)

    def _compute_step(self, globalg):
        a = self.stepsize * np.sqrt(1 - self.beta2**self.t) / (1 - self.beta1**self.t)
        self.m = self.beta1 * self.m + (1 - self.beta1) * globalg
        self.v = self.beta2 * self.v + (1 - self.beta2) * (globalg * globalg)
        return (-a * self.m / (np.sqrt(self.v) + 1e-8)).astype(np.float32)


def get_flat(net):
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy().copy()


def set_flat(net, vector):
    torch.nn.utils.vector_to_parameters(torch.from_numpy(vector), net.parameters())


def centered_ranks(x):
    y = x.ravel().argsort().argsort().reshape(x.shape).astype(np.float32)
    return y / (x.size - 1) - 0.5


class RunningStat:
    def __init__(self, shape, eps):
        self.sum, self.sumsq, self.count = np.zeros(shape), np.full(shape, eps), eps

    def increment(self, s, ssq, c):
        self.sum += s
        self.sumsq += ssq
        self.count += c

    @property
    def mean(self):
        return self.sum / self.count

    @property
    def std(self):
        return np.sqrt(np.maximum(self.sumsq / self.count - np.square(self.mean), 1e-2))


def rollout(net, rs, ob_stat, seen):
    state, total = rs.randn(4), 0.0
    for _ in range(5):
        ob = (state - ob_stat.mean) / ob_stat.std
        seen.append(state.copy())
        with torch.no_grad():
            action = net(torch.from_numpy(ob).float()).numpy()
        state = 0.8 * state + 0.3 * np.resize(action, 4) + 0.01 * rs.randn(4)
        total -= np.abs(state).sum()
    return total


def main():
    job = relight.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).requires_grad_(False)
    noise, rs, ob_stat = SharedNoiseTable(), np.random.RandomState(job.rank + 10), RunningStat((4,), eps=1e-2)
    theta = get_flat(net)
    optimizer, sigma = Adam(theta, stepsize=0.05), 0.1
    training = relight.Training(model=net)
    best, mean_history = -np.inf, []
    for step in training.steps(until=14):
        with step:
            theta, indices, returns, seen = optimizer.theta, [], [], []
            for _ in range(3):
                idx = noise.sample_index(rs, len(theta))
                v = sigma * noise.get(idx, len(theta))
                pair = []
                for sign in (1, -1):
                    set_flat(net, theta + sign * v)
                    pair.append(rollout(net, rs, ob_stat, seen))
                indices.append(idx)
                returns.append(pair)
            gathered = [None] * job.world_size
            dist.all_gather_object(gathered, (indices, returns, np.sum(seen, 0), np.square(seen).sum(0), len(seen)))
            all_idx = [i for g in gathered for i in g[0]]
            all_ret = np.array([r for g in gathered for r in g[1]])
            for g in gathered:
                ob_stat.increment(*g[2:])
            ranks = centered_ranks(all_ret)
            g = sum((a - b) * noise.get(i, len(theta)) for (a, b), i in zip(ranks, all_idx)) / len(all_idx)
            optimizer.update(-g + 0.005 * theta)
            set_flat(net, optimizer.theta)
            mean_history.append(all_ret.mean())
            if all_ret.max() > best:
                best = all_ret.max()
            elif len(mean_history) > 3 and mean_history[-1] < mean_history[-3]:
                sigma *= 0.95
    finish(
        job,
        net=net,
        theta=optimizer.theta,
        m=optimizer.m,
        v=optimizer.v,
        t=optimizer.t,
        sigma=sigma,
        best=float(best),
        mean=ob_stat.mean,
        rng=rs.randint(1 << 30),
        history=mean_history,
    )


if __name__ == "__main__":
    main()
