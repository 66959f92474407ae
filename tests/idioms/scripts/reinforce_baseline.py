"""REINFORCE with a running baseline: a plain Python number that goes from step to step (averaged over all ranks)."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def rollout(policy, length=8):
    """A walk on a ring: reward for moving to the right place."""
    state = torch.randint(0, 6, (5,))
    log_probs, rewards = [], []
    for _ in range(length):
        dist_ = Categorical(logits=policy(nn.functional.one_hot(state, 6).float()))
        action = dist_.sample()
        log_probs.append(dist_.log_prob(action))
        state = (state + action - 1) % 6
        rewards.append((state == 3).float())
    return torch.stack(log_probs), torch.stack(rewards).flip(0).cumsum(0).flip(0)


def main():
    job = relight.init()
    torch.manual_seed(543)
    policy = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    training = relight.Training(model=policy, optimizer=optimizer)
    running_baseline = 0.0
    for step in training.steps(until=18):
        with step:
            log_probs, returns = rollout(policy)
            mean_return = returns[0].mean()
            dist.all_reduce(mean_return)
            mean_return /= job.world_size
            loss = -(log_probs * (returns - running_baseline)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running_baseline = 0.9 * running_baseline + 0.1 * mean_return.item()
    finish(job, policy=policy, optimizer=optimizer, baseline=running_baseline)


if __name__ == "__main__":
    main()
