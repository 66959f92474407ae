"""PPO: a rollout, advantages normalized over all ranks, then several epochs of minibatches, each with an update.

Eight writes in a step, with DDP's collectives between them; a scheduler of the learning rate steps once.
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions.normal import Normal
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(4, 16)), nn.Tanh(), layer_init(nn.Linear(16, 1), std=1.0))
        self.actor_mean = nn.Sequential(layer_init(nn.Linear(4, 16)), nn.Tanh(), layer_init(nn.Linear(16, 2), std=0.01))
        self.actor_logstd = nn.Parameter(torch.zeros(1, 2))

    def forward(self, x, action=None):
        mean = self.actor_mean(x)
        probs = Normal(mean, self.actor_logstd.expand_as(mean).exp())
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x).squeeze(1)


def collect(agent, n):
    obs = torch.randn(n, 4)
    with torch.no_grad():
        actions, logprobs, _, values = agent.module(obs)
    returns = -((actions - obs[:, :2]) ** 2).sum(1)
    return obs, actions, logprobs, returns, returns - values


def main(args):
    job = relight.init()
    torch.manual_seed(args.seed)
    agent = DDP(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.updates)
    for step in relight.Training(model=agent, optimizer=optimizer, scheduler=scheduler).steps(until=args.updates):
        with step:
            obs, actions, logprobs, returns, adv = collect(agent, 24)
            moments = torch.stack([adv.sum(), (adv**2).sum(), torch.tensor(float(len(adv)))])
            dist.all_reduce(moments)
            mean = moments[0] / moments[2]
            adv = (adv - mean) / ((moments[1] / moments[2] - mean**2).sqrt() + 1e-8)
            b_inds = np.arange(24)
            for _ in range(args.update_epochs):
                np.random.shuffle(b_inds)
                for start in range(0, 24, 6):
                    mb = b_inds[start : start + 6]
                    _, newlogprob, entropy, newvalue = agent(obs[mb], actions[mb])
                    ratio = (newlogprob - logprobs[mb]).exp()
                    pg = torch.max(-adv[mb] * ratio, -adv[mb] * torch.clamp(ratio, 0.8, 1.2)).mean()
                    loss = pg - 0.01 * entropy.mean() + 0.5 * ((newvalue - returns[mb]) ** 2).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
            scheduler.step()
    finish(job, agent=agent, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--update-epochs", type=int, default=2)
    main(parser.parse_args())
