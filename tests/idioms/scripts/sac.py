"""Soft actor-critic: two critics under one optimizer, the policy, a learned temperature that no module holds.

Three writes in a step; log_alpha is a bare tensor, and its gradient is averaged by hand.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import relight
from tests.idioms.digest import finish


class QNetworks(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1 = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))
        self.q2 = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, x, a):
        xa = torch.cat([x, a], 1)
        return self.q1(xa), self.q2(xa)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(3, 12)
        self.mean, self.log_std = nn.Linear(12, 2), nn.Linear(12, 2)

    def forward(self, x):
        h = torch.relu(self.trunk(x))
        mean, log_std = self.mean(h), self.log_std(h).clamp(-5, 2)
        eps = torch.randn_like(mean)
        z = mean + eps * log_std.exp()
        log_prob = (-0.5 * eps**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(1, keepdim=True)
        return torch.tanh(z), log_prob - torch.log(1 - torch.tanh(z) ** 2 + 1e-6).sum(1, keepdim=True)


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(1))


def main():
    job = relight.init()
    torch.manual_seed(8)
    qf, qf_target, policy, temperature = QNetworks(), QNetworks(), Policy(), Temperature()
    qf_target.load_state_dict(qf.state_dict())
    qf, policy = DistributedDataParallel(qf), DistributedDataParallel(policy)
    q_optimizer = torch.optim.Adam(qf.parameters(), lr=1e-3)
    pi_optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    a_optimizer = torch.optim.Adam([temperature.log_alpha], lr=1e-2)
    training = relight.Training(
        model=dict(qf=qf, qf_target=qf_target, policy=policy, temperature=temperature),
        optimizer=dict(q=q_optimizer, pi=pi_optimizer, a=a_optimizer),
        data=lambda n: torch.randn(8, 3),
    )
    for step in training.steps(until=14):
        with step as obs:
            alpha = temperature.log_alpha.exp().item()
            with torch.no_grad():
                act, _ = policy.module(obs)
                nxt = obs + 0.1 * act.sum(1, keepdim=True)
                nact, nlogp = policy.module(nxt)
                target = -nxt.pow(2).sum(1, keepdim=True) + 0.9 * (torch.min(*qf_target(nxt, nact)) - alpha * nlogp)
            q1, q2 = qf(obs, act)
            q_optimizer.zero_grad()
            (nn.functional.mse_loss(q1, target) + nn.functional.mse_loss(q2, target)).backward()
            q_optimizer.step()

            pi, logp = policy(obs)
            pi_loss = (alpha * logp - torch.min(*qf.module(obs, pi))).mean()
            pi_optimizer.zero_grad()
            pi_loss.backward()
            pi_optimizer.step()

            alpha_loss = -(temperature.log_alpha * (logp.detach() - 2)).mean()
            a_optimizer.zero_grad()
            alpha_loss.backward()
            dist.all_reduce(temperature.log_alpha.grad)
            temperature.log_alpha.grad /= job.world_size
            a_optimizer.step()
            with torch.no_grad():
                for p, tp in zip(qf.module.parameters(), qf_target.parameters()):
                    tp.mul_(0.95).add_(p, alpha=0.05)
    finish(job, qf=qf, t=qf_target, policy=policy, temp=temperature, q=q_optimizer, pi=pi_optimizer, a=a_optimizer)


if __name__ == "__main__":
    main()
