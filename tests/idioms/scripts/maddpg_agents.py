"""MADDPG: agents as objects in a list with networks, targets and optimizers each, Ornstein-Uhlenbeck noise objects reset at an
episode's end, a shared replay of nested lists, noise that decays by a percentage left."""

# ranks: 2
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class OUNoise:
    def __init__(self, action_dimension, scale=0.1, mu=0, theta=0.15, sigma=0.2):
        self.action_dimension, self.scale, self.mu, self.theta, self.sigma = action_dimension, scale, mu, theta, sigma
        self.state = np.ones(self.action_dimension) * self.mu
        self.reset()

    def reset(self):
        self.state = np.ones(self.action_dimension) * self.mu

    def noise(self):
        x = self.state
        dx = self.theta * (self.mu - x) + self.sigma * np.random.randn(len(x))
        self.state = x + dx
        return self.state * self.scale


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 16), nn.ReLU(), nn.Linear(16, o))


class DDPGAgent:
    def __init__(self, lr=0.01):
        self.policy, self.critic, self.target_policy, self.target_critic = mlp(4, 2), mlp(12, 1), mlp(4, 2), mlp(12, 1)
        hard_update(self.target_policy, self.policy)
        hard_update(self.target_critic, self.critic)
        self.policy_optimizer = optim.Adam(self.policy.parameters(), lr=lr)
        self.critic_optimizer = optim.Adam(self.critic.parameters(), lr=lr)
        self.exploration = OUNoise(2)

    def scale_noise(self, scale):
        self.exploration.scale = scale

    def step(self, obs, explore=False):
        with torch.no_grad():
            action = torch.tanh(self.policy(obs))
        if explore:
            action = action + torch.tensor(self.exploration.noise(), dtype=torch.float32)
        return action.clamp(-1, 1)


def hard_update(target, source):
    for tp, p in zip(target.parameters(), source.parameters()):
        tp.data.copy_(p.data)


def soft_update(target, source, tau):
    for tp, p in zip(target.parameters(), source.parameters()):
        tp.data.copy_(tp.data * (1.0 - tau) + p.data * tau)


class MADDPG:
    def __init__(self, nagents):
        self.agents = [DDPGAgent() for _ in range(nagents)]
        self.niter, self.gamma, self.tau = 0, 0.95, 0.05

    def update(self, sample, agent_i, logger):
        obs, acs, rews, next_obs = sample
        curr = self.agents[agent_i]
        curr.critic_optimizer.zero_grad()
        trgt_acs = [torch.tanh(a.target_policy(o)) for a, o in zip(self.agents, next_obs)]
        target = rews[agent_i][:, None] + self.gamma * curr.target_critic(torch.cat((*next_obs, *trgt_acs), 1))
        vf_loss = F.mse_loss(curr.critic(torch.cat((*obs, *acs), 1)), target.detach())
        vf_loss.backward()
        average_gradients(curr.critic)
        torch.nn.utils.clip_grad_norm_(curr.critic.parameters(), 0.5)
        curr.critic_optimizer.step()
        curr.policy_optimizer.zero_grad()
        out = curr.policy(obs[agent_i])
        all_acs = [torch.tanh(out) if i == agent_i else a for i, a in enumerate(acs)]
        pol_loss = -curr.critic(torch.cat((*obs, *all_acs), 1)).mean() + (out**2).mean() * 1e-3
        pol_loss.backward()
        average_gradients(curr.policy)
        curr.policy_optimizer.step()
        logger.setdefault(f"agent{agent_i}/losses", []).append((self.niter, vf_loss.item(), pol_loss.item()))

    def update_all_targets(self):
        for a in self.agents:
            soft_update(a.target_critic, a.critic, self.tau)
            soft_update(a.target_policy, a.policy, self.tau)
        self.niter += 1


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


class World:
    def __init__(self, rng):
        self.rng = rng

    def reset(self):
        self.pos, self.vel, self.t = self.rng.uniform(-1, 1, (2, 2)), np.zeros((2, 2)), 0
        return self._obs()

    def _obs(self):
        return [torch.tensor(np.concatenate([self.pos[i], self.pos[1 - i]]), dtype=torch.float32) for i in range(2)]

    def step(self, actions):
        self.vel = 0.7 * self.vel + 0.1 * np.stack([a.numpy() for a in actions])
        self.pos = self.pos + self.vel
        self.t += 1
        return self._obs(), [-float(np.abs(self.pos[i]).sum()) for i in range(2)], self.t >= 7


job = relight.init()
torch.manual_seed(0)
np.random.seed(job.rank)
maddpg = MADDPG(2)
env = World(np.random.RandomState(11 + job.rank))
replay = {"obs": [], "acs": [], "rews": [], "next_obs": []}
logger, ep_rewards, t, ep_i, obs = {}, [0.0], 0, 0, env.reset()
models = {
    f"{n}{i}": getattr(a, n)
    for i, a in enumerate(maddpg.agents)
    for n in ("policy", "critic", "target_policy", "target_critic")
}
optimizers = {
    f"{n}{i}": getattr(a, n) for i, a in enumerate(maddpg.agents) for n in ("policy_optimizer", "critic_optimizer")
}
training = relight.Training(model=models, optimizer=optimizers)
for step in training.steps(until=14):
    with step:
        explr_pct_remaining = max(0, 10 - ep_i) / 10
        for a in maddpg.agents:
            a.scale_noise(0.3 * explr_pct_remaining)
        for _ in range(4):
            actions = [a.step(o, explore=True) for a, o in zip(maddpg.agents, obs)]
            next_obs, rewards, done = env.step(actions)
            for key, value in zip(replay, (obs, actions, rewards, next_obs)):
                replay[key].append(value)
                if len(replay[key]) > 40:
                    replay[key].pop(0)
            ep_rewards[-1] += sum(rewards)
            obs = next_obs
            t += 1
            if done:
                ep_i += 1
                ep_rewards.append(0.0)
                obs = env.reset()
                for a in maddpg.agents:
                    a.exploration.reset()
        for a_i in range(2):
            inds = np.random.choice(np.arange(len(replay["obs"])), size=8, replace=True)
            sample = [
                [torch.stack([torch.as_tensor(replay[k][j][i]) for j in inds]).float() for i in range(2)]
                for k in replay
            ]
            maddpg.update(sample, a_i, logger)
        maddpg.update_all_targets()
finish(
    job, **models, niter=maddpg.niter, t=t, ep=ep_i, rewards=ep_rewards, logger=logger,
    noise=[a.exploration.state for a in maddpg.agents],
)  # fmt: skip
