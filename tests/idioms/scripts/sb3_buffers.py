"""An off-policy algorithm in layers of classes: a buffer of arrays, action noise, a schedule by progress, callbacks, SDE noise."""

# ranks: 2
from collections import deque
from typing import NamedTuple

import numpy as np
import torch as th
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ReplayBufferSamples(NamedTuple):
    observations: th.Tensor
    actions: th.Tensor
    next_observations: th.Tensor
    dones: th.Tensor
    rewards: th.Tensor


class BaseBuffer:
    def __init__(self, buffer_size, n_envs):
        self.buffer_size, self.n_envs, self.pos, self.full = max(buffer_size // n_envs, 1), n_envs, 0, False

    def size(self):
        return self.buffer_size if self.full else self.pos

    def to_torch(self, array):
        return th.tensor(array)


class ReplayBuffer(BaseBuffer):
    def __init__(self, buffer_size, n_envs, obs=3, act=1):
        super().__init__(buffer_size, n_envs)
        self.observations = np.zeros((self.buffer_size, n_envs, obs), dtype=np.float32)
        self.actions = np.zeros((self.buffer_size, n_envs, act), dtype=np.float32)
        self.rewards = np.zeros((self.buffer_size, n_envs), dtype=np.float32)
        self.dones = np.zeros((self.buffer_size, n_envs), dtype=np.float32)

    def add(self, obs, next_obs, action, reward, done):
        self.observations[self.pos] = np.array(obs)
        self.observations[(self.pos + 1) % self.buffer_size] = np.array(next_obs)  # memory is shared
        self.actions[self.pos], self.rewards[self.pos], self.dones[self.pos] = action, reward, done
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full, self.pos = True, 0

    def sample(self, batch_size):
        if self.full:
            inds = (np.random.randint(1, self.buffer_size, size=batch_size) + self.pos) % self.buffer_size
        else:
            inds = np.random.randint(0, self.pos, size=batch_size)
        env = np.random.randint(0, high=self.n_envs, size=(batch_size,))
        nxt = self.observations[(inds + 1) % self.buffer_size, env]
        data = (
            self.observations[inds, env],
            self.actions[inds, env],
            nxt,
            self.dones[inds, env],
            self.rewards[inds, env],
        )
        return ReplayBufferSamples(*map(self.to_torch, data))


class OrnsteinUhlenbeck:
    def __init__(self, mean, sigma, theta=0.15, dt=1e-2):
        self._theta, self._mu, self._sigma, self._dt = theta, mean, sigma, dt
        self.reset()

    def __call__(self):
        noise = (
            self.noise_prev
            + self._theta * (self._mu - self.noise_prev) * self._dt
            + self._sigma * np.sqrt(self._dt) * np.random.normal(size=self._mu.shape)
        )
        self.noise_prev = noise
        return noise.astype(np.float32)

    def reset(self):
        self.noise_prev = np.zeros_like(self._mu)


class VectorizedActionNoise:
    def __init__(self, base, n_envs):
        import copy

        self.noises = [copy.deepcopy(base) for _ in range(n_envs)]

    def __call__(self):
        return np.stack([noise() for noise in self.noises])

    def reset(self, indices):
        for i in indices:
            self.noises[i].reset()


class BaseCallback:
    def __init__(self):
        self.n_calls, self.num_timesteps, self.model = 0, 0, None

    def on_step(self):
        self.n_calls += 1
        self.num_timesteps = self.model.num_timesteps
        return self._on_step()


class StopExploring(BaseCallback):
    def __init__(self, threshold):
        super().__init__()
        self.threshold, self.best_mean = threshold, -np.inf

    def _on_step(self):
        if len(self.model.ep_info_buffer) > 2:
            mean = float(np.mean([e["r"] for e in self.model.ep_info_buffer]))
            if mean > self.best_mean:
                self.best_mean = mean
                self.model.noise_scale *= self.threshold


class Env:
    def __init__(self, n, seed):
        self.rng, self.n = np.random.default_rng(seed), n
        self.s = self.rng.normal(size=(n, 3)).astype(np.float32)
        self.t, self.total = np.zeros(n, int), np.zeros(n)

    def step(self, a):
        self.s = (0.9 * self.s + 0.1 * a + 0.02 * self.rng.normal(size=(self.n, 3))).astype(np.float32)
        self.t += 1
        reward = -np.abs(self.s).sum(1)
        self.total += reward
        done = self.t >= 6 + np.arange(self.n)
        infos = [{"r": self.total[i], "l": self.t[i]} if done[i] else None for i in range(self.n)]
        nxt = self.s.copy()
        for i in np.flatnonzero(done):
            self.s[i], self.t[i], self.total[i] = self.rng.normal(size=3), 0, 0.0
        return nxt, reward, done, infos


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 16), nn.ReLU(), nn.Linear(16, o))


def polyak_update(params, target_params, tau):
    with th.no_grad():
        for p, t in zip(params, target_params):
            t.data.mul_(1 - tau)
            th.add(t.data, p.data, alpha=tau, out=t.data)


class BaseAlgorithm:
    def __init__(self, learning_rate):
        self.learning_rate, self.num_timesteps, self._n_updates, self._current_progress_remaining = (
            learning_rate,
            0,
            0,
            1.0,
        )
        self.ep_info_buffer, self._last_obs, self.noise_scale = deque(maxlen=5), None, 1.0

    @property
    def lr_schedule(self):
        return lambda progress: self.learning_rate * progress

    def _update_learning_rate(self, optimizers):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr_schedule(self._current_progress_remaining)


class DDPG(BaseAlgorithm):
    def __init__(self, rank, total):
        super().__init__(0.01)
        self.total, self.env = total, Env(2, rank)
        self.actor, self.critic, self.actor_target, self.critic_target = mlp(3, 1), mlp(4, 1), mlp(3, 1), mlp(4, 1)
        self.actor_target.load_state_dict(self.actor.state_dict())
        self.critic_target.load_state_dict(self.critic.state_dict())
        self.actor_ddp, self.critic_ddp = DDP(self.actor), DDP(self.critic)
        self.actor_opt = th.optim.Adam(self.actor.parameters(), lr=0.01)
        self.critic_opt = th.optim.Adam(self.critic.parameters(), lr=0.01)
        self.replay_buffer = ReplayBuffer(40, 2)
        self.action_noise = VectorizedActionNoise(OrnsteinUhlenbeck(np.zeros(1), 0.3 * np.ones(1)), 2)

    def collect_rollouts(self, callback, n):
        if self._last_obs is None:
            self._last_obs = self.env.s.copy()
        for _ in range(n):
            with th.no_grad():
                action = (
                    np.tanh(self.actor(th.from_numpy(self._last_obs)).numpy()) + self.noise_scale * self.action_noise()
                )
            new_obs, reward, done, infos = self.env.step(action)
            self.num_timesteps += 2
            for info in infos:
                if info is not None:
                    self.ep_info_buffer.extend([info])
            callback.on_step()
            self.replay_buffer.add(self._last_obs, new_obs, action, reward, done)
            self._last_obs = new_obs
            self.action_noise.reset(np.flatnonzero(done))
        self._current_progress_remaining = 1.0 - self.num_timesteps / self.total

    def train(self, gradient_steps):
        self._update_learning_rate([self.actor_opt, self.critic_opt])
        for _ in range(gradient_steps):
            self._n_updates += 1
            data = self.replay_buffer.sample(8)
            with th.no_grad():
                na = th.tanh(self.actor_target(data.next_observations))
                y = data.rewards[:, None] + (1 - data.dones[:, None]) * 0.9 * self.critic_target(
                    th.cat([data.next_observations, na], 1)
                )
            loss = ((self.critic_ddp(th.cat([data.observations, data.actions], 1)) - y) ** 2).mean()
            self.critic_opt.zero_grad()
            loss.backward()
            self.critic_opt.step()
            if self._n_updates % 2 == 0:
                a = th.tanh(self.actor_ddp(data.observations))
                self.actor_opt.zero_grad()
                (-self.critic(th.cat([data.observations, a], 1)).mean()).backward()
                self.actor_opt.step()
                polyak_update(self.critic.parameters(), self.critic_target.parameters(), 0.05)
                polyak_update(self.actor.parameters(), self.actor_target.parameters(), 0.05)

    def learn(self, callback):
        callback.model = self
        training = relight.Training(
            model=dict(a=self.actor_ddp, c=self.critic_ddp, at=self.actor_target, ct=self.critic_target),
            optimizer=dict(a=self.actor_opt, c=self.critic_opt),
        )
        for step in training.steps(until=14):
            with step:
                self.collect_rollouts(callback, 6)
                self.train(3)


if __name__ == "__main__":
    job = relight.init()
    th.manual_seed(2)
    algo, cb = DDPG(job.rank, 400), StopExploring(0.9)
    algo.learn(cb)
    finish(
        job,
        actor=algo.actor_ddp,
        critic=algo.critic_ddp,
        at=algo.actor_target,
        ct=algo.critic_target,
        ao=algo.actor_opt,
        co=algo.critic_opt,
        obs=algo.replay_buffer.observations,
        pos=algo.replay_buffer.pos,
        scale=algo.noise_scale,
        noise=[n.noise_prev for n in algo.action_noise.noises],
        n=algo._n_updates,
        calls=cb.n_calls,
        last=algo._last_obs,
    )
