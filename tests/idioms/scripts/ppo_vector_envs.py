"""PPO in one file: vectorized environments in layers of wrappers, each with a generator and running statistics of its own."""

# ranks: 2
from collections import deque
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
from torch.distributions.normal import Normal
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class PointEnv:
    def __init__(self, seed):
        self.np_random = np.random.default_rng(seed)
        self.state, self.elapsed = None, 0

    def reset(self):
        self.state, self.elapsed = self.np_random.uniform(-1, 1, size=3), 0
        return self.state.copy()

    def step(self, action):
        self.state = 0.9 * self.state + 0.1 * np.append(action, action.sum()) + 0.02 * self.np_random.standard_normal(3)
        self.elapsed += 1
        return self.state.copy(), -float((self.state**2).sum()), self.elapsed >= 7, {}


class Wrapper:
    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self):
        return self.env.reset()

    def step(self, action):
        return self.env.step(action)


class RecordEpisodeStatistics(Wrapper):
    def __init__(self, env, size=10):
        super().__init__(env)
        self.returns, self.length, self.total = deque(maxlen=size), 0, 0.0

    def step(self, action):
        obs, reward, done, info = super().step(action)
        self.total += reward
        self.length += 1
        if done:
            info["episode"] = {"r": self.total, "l": self.length}
            self.returns.append(self.total)
            self.total, self.length = 0.0, 0
        return obs, reward, done, info


class ClipAction(Wrapper):
    def step(self, action):
        return self.env.step(np.clip(action, -1, 1))


class RunningMeanStd:
    def __init__(self, shape=()):
        self.mean, self.var, self.count = np.zeros(shape, "float64"), np.ones(shape, "float64"), 1e-4

    def update(self, x):
        batch_mean, batch_var, n = np.mean(x, axis=0), np.var(x, axis=0), x.shape[0]
        delta, total = batch_mean - self.mean, self.count + n
        self.mean = self.mean + delta * n / total
        self.var = (self.var * self.count + batch_var * n + np.square(delta) * self.count * n / total) / total
        self.count = total


class NormalizeObservation(Wrapper):
    def __init__(self, env):
        super().__init__(env)
        self.obs_rms = RunningMeanStd((3,))

    def normalize(self, obs):
        self.obs_rms.update(obs[None])
        return (obs - self.obs_rms.mean) / np.sqrt(self.obs_rms.var + 1e-8)

    def reset(self):
        return self.normalize(self.env.reset())

    def step(self, action):
        obs, reward, done, info = self.env.step(action)
        return self.normalize(obs), reward, done, info


class NormalizeReward(Wrapper):
    def __init__(self, env, gamma=0.99):
        super().__init__(env)
        self.return_rms, self.returns_, self.gamma = RunningMeanStd(), np.zeros(1), gamma

    def step(self, action):
        obs, reward, done, info = self.env.step(action)
        self.returns_ = self.returns_ * self.gamma + reward
        self.return_rms.update(self.returns_)
        if done:
            self.returns_[:] = 0
        return obs, reward / np.sqrt(self.return_rms.var + 1e-8), done, info


class SyncVectorEnv:
    def __init__(self, fns):
        self.envs = [fn() for fn in fns]
        self.num_envs = len(self.envs)
        self.observations, self.rewards, self.dones = (
            np.zeros((self.num_envs, 3)),
            np.zeros(self.num_envs),
            np.zeros(self.num_envs),
        )

    def reset(self):
        for i, env in enumerate(self.envs):
            self.observations[i] = env.reset()
        return self.observations.copy()

    def step(self, actions):
        infos = []
        for i, (env, action) in enumerate(zip(self.envs, actions)):
            obs, self.rewards[i], self.dones[i], info = env.step(action)
            if self.dones[i]:
                obs = env.reset()
            self.observations[i] = obs
            infos.append(info)
        return self.observations.copy(), self.rewards.copy(), self.dones.copy(), infos


def make_env(seed):
    def thunk():
        return NormalizeReward(NormalizeObservation(ClipAction(RecordEpisodeStatistics(PointEnv(seed)))))

    return thunk


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(3, 16)), nn.Tanh(), layer_init(nn.Linear(16, 1), std=1.0))
        self.actor_mean = nn.Sequential(layer_init(nn.Linear(3, 16)), nn.Tanh(), layer_init(nn.Linear(16, 2), std=0.01))
        self.actor_logstd = nn.Parameter(torch.zeros(1, 2))

    def forward(self, x, action=None):
        mean = self.actor_mean(x)
        probs = Normal(mean, self.actor_logstd.expand_as(mean).exp())
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


if __name__ == "__main__":
    args = SimpleNamespace(
        num_steps=8, num_envs=3, gamma=0.99, gae_lambda=0.95, clip_coef=0.2, epochs=2, lr=3e-3, total=14
    )
    job = relight.init()
    torch.manual_seed(1)
    envs = SyncVectorEnv([make_env(100 * job.rank + i) for i in range(args.num_envs)])
    agent = DDP(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    obs = torch.zeros((args.num_steps, args.num_envs, 3))
    actions = torch.zeros((args.num_steps, args.num_envs, 2))
    logprobs, rewards, dones, values = (torch.zeros((args.num_steps, args.num_envs)) for _ in range(4))
    global_step, episodes = 0, []
    next_obs = torch.Tensor(envs.reset())
    next_done = torch.zeros(args.num_envs)
    training = relight.Training(model=agent, optimizer=optimizer)
    for step in training.steps(until=args.total):
        with step:
            optimizer.param_groups[0]["lr"] = (1.0 - step.number / args.total) * args.lr
            for t in range(args.num_steps):
                global_step += args.num_envs
                obs[t], dones[t] = next_obs, next_done
                with torch.no_grad():
                    action, logprob, _, value = agent.module(next_obs)
                    values[t] = value.flatten()
                actions[t], logprobs[t] = action, logprob
                next_obs, reward, done, infos = envs.step(action.numpy())
                rewards[t] = torch.tensor(reward)
                next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(done)
                for info in infos:
                    if "episode" in info:
                        episodes.append((global_step, info["episode"]["r"]))
            with torch.no_grad():
                next_value = agent.module.critic(next_obs).reshape(1, -1)
                advantages, lastgaelam = torch.zeros_like(rewards), 0
                for t in reversed(range(args.num_steps)):
                    last = t == args.num_steps - 1
                    nonterminal = 1.0 - (next_done if last else dones[t + 1])
                    nextvalues = next_value if last else values[t + 1]
                    delta = rewards[t] + args.gamma * nextvalues * nonterminal - values[t]
                    advantages[t] = lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
                returns = advantages + values
            b_obs, b_actions, b_logprobs = obs.reshape(-1, 3), actions.reshape(-1, 2), logprobs.reshape(-1)
            b_adv, b_ret, b_inds = advantages.reshape(-1), returns.reshape(-1), np.arange(24)
            for _ in range(args.epochs):
                np.random.shuffle(b_inds)
                for mb in np.split(b_inds, 2):
                    _, newlogprob, entropy, newvalue = agent(b_obs[mb], b_actions[mb])
                    ratio = (newlogprob - b_logprobs[mb]).exp()
                    adv = (b_adv[mb] - b_adv[mb].mean()) / (b_adv[mb].std() + 1e-8)
                    pg = torch.max(
                        -adv * ratio, -adv * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                    ).mean()
                    loss = pg - 0.01 * entropy.mean() + 0.5 * ((newvalue.flatten() - b_ret[mb]) ** 2).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
    rms = [e.env.obs_rms for e in envs.envs]
    finish(
        job,
        agent=agent,
        optimizer=optimizer,
        step=global_step,
        episodes=episodes,
        obs=obs,
        next_obs=next_obs,
        mean=[r.mean for r in rms],
        var=[r.var for r in rms],
        state=[e.state for e in envs.envs],
    )
