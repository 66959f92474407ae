"""CleanRL's single-file SAC: log_alpha is a plain tensor with an Adam of its own, targets moved by Polyak, delayed policy
updates that are repeated to make up for it, a replay buffer of arrays, an environment with autoreset."""

# ranks: 2
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim

import relight
from tests.idioms.digest import finish


@dataclass
class Args:
    seed: int = 1
    buffer_size: int = 64
    gamma: float = 0.99
    tau: float = 0.05
    batch_size: int = 16
    learning_starts: int = 4
    policy_frequency: int = 2
    target_network_frequency: int = 1
    total_timesteps: int = 26


class ReplayBuffer:
    def __init__(self, size):
        self.size, self.pos, self.full = size, 0, False
        self.observations = np.zeros((size, 3), np.float32)
        self.next_observations, self.actions = np.zeros((size, 3), np.float32), np.zeros((size, 1), np.float32)
        self.rewards, self.dones = np.zeros((size, 1), np.float32), np.zeros((size, 1), np.float32)

    def add(self, obs, next_obs, action, reward, done):
        self.observations[self.pos], self.next_observations[self.pos] = obs, next_obs
        self.actions[self.pos], self.rewards[self.pos], self.dones[self.pos] = action, reward, done
        self.pos += 1
        if self.pos == self.size:
            self.full, self.pos = True, 0

    def sample(self, batch_size):
        inds = np.random.randint(0, self.size if self.full else self.pos, size=batch_size)
        parts = (self.observations, self.next_observations, self.actions, self.rewards, self.dones)
        return [torch.tensor(part[inds]) for part in parts]


class Pendulum:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.th, self.thdot, self.t = self.rng.uniform(-np.pi, np.pi), self.rng.uniform(-1, 1), 0
        return self.obs()

    def obs(self):
        return np.array([np.cos(self.th), np.sin(self.th), self.thdot], np.float32)

    def step(self, u):
        u = float(np.clip(u, -2, 2)[0])
        cost = self.th**2 + 0.1 * self.thdot**2 + 0.001 * u**2
        self.thdot = float(np.clip(self.thdot + (15 * np.sin(self.th) + 3 * u) * 0.05, -8, 8))
        self.th += self.thdot * 0.05
        self.t += 1
        return self.obs(), -cost, self.t % 10 == 0


class SoftQNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 24), nn.Linear(24, 1)

    def forward(self, x, a):
        return self.fc2(F.relu(self.fc1(torch.cat([x, a], 1))))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc_mean, self.fc_logstd = nn.Linear(3, 24), nn.Linear(24, 1), nn.Linear(24, 1)
        self.register_buffer("action_scale", torch.tensor([2.0]))

    def get_action(self, x):
        h = F.relu(self.fc1(x))
        mean, log_std = self.fc_mean(h), -5 + 0.5 * 7 * (torch.tanh(self.fc_logstd(h)) + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return y_t * self.action_scale, log_prob.sum(1, keepdim=True)


def average_gradients(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


if __name__ == "__main__":
    args = Args()
    job = relight.init()
    np.random.seed(args.seed + job.rank)
    torch.manual_seed(args.seed)
    env = Pendulum(args.seed + job.rank)
    actor, qf1, qf2, qf1_target, qf2_target = Actor(), SoftQNetwork(), SoftQNetwork(), SoftQNetwork(), SoftQNetwork()
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    q_optimizer = optim.Adam(list(qf1.parameters()) + list(qf2.parameters()), lr=1e-3)
    actor_optimizer = optim.Adam(list(actor.parameters()), lr=3e-4)
    target_entropy = -1.0
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha = log_alpha.exp().item()
    a_optimizer = optim.Adam([log_alpha], lr=1e-3)
    rb = ReplayBuffer(args.buffer_size)
    training = relight.Training(
        model={"actor": actor, "qf1": qf1, "qf2": qf2, "qf1_target": qf1_target, "qf2_target": qf2_target},
        optimizer={"q": q_optimizer, "actor": actor_optimizer, "alpha": a_optimizer},
    )
    obs, episodic_return, returns = env.obs(), 0.0, []
    for step in training.steps(until=args.total_timesteps):
        global_step = step.number
        with step:
            for _ in range(4):
                if global_step < args.learning_starts:
                    action = np.random.uniform(-2, 2, size=1)
                else:
                    with torch.no_grad():
                        action = actor.get_action(torch.tensor(obs)[None])[0][0].numpy()
                next_obs, reward, done = env.step(action)
                rb.add(obs, next_obs, action, reward, done)
                episodic_return += reward
                obs = next_obs
                if done:
                    returns.append(episodic_return)
                    obs, episodic_return = env.reset(), 0.0
            if global_step > args.learning_starts:
                data_obs, data_next, data_act, data_rew, data_done = rb.sample(args.batch_size)
                with torch.no_grad():
                    next_act, next_log_pi = actor.get_action(data_next)
                    min_next = torch.min(qf1_target(data_next, next_act), qf2_target(data_next, next_act))
                    next_q_value = data_rew + (1 - data_done) * args.gamma * (min_next - alpha * next_log_pi)
                qf1_loss = F.mse_loss(qf1(data_obs, data_act), next_q_value)
                qf2_loss = F.mse_loss(qf2(data_obs, data_act), next_q_value)
                q_optimizer.zero_grad()
                (qf1_loss + qf2_loss).backward()
                average_gradients(q_optimizer)
                q_optimizer.step()
                if global_step % args.policy_frequency == 0:
                    for _ in range(args.policy_frequency):
                        pi, log_pi = actor.get_action(data_obs)
                        min_qf_pi = torch.min(qf1(data_obs, pi), qf2(data_obs, pi))
                        actor_loss = ((alpha * log_pi) - min_qf_pi).mean()
                        actor_optimizer.zero_grad()
                        actor_loss.backward()
                        average_gradients(actor_optimizer)
                        actor_optimizer.step()
                        with torch.no_grad():
                            _, log_pi = actor.get_action(data_obs)
                        alpha_loss = (-log_alpha.exp() * (log_pi + target_entropy)).mean()
                        a_optimizer.zero_grad()
                        alpha_loss.backward()
                        average_gradients(a_optimizer)
                        a_optimizer.step()
                        alpha = log_alpha.exp().item()
                if global_step % args.target_network_frequency == 0:
                    for param, target_param in zip(qf1.parameters(), qf1_target.parameters()):
                        target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
                    for param, target_param in zip(qf2.parameters(), qf2_target.parameters()):
                        target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
    finish(
        job, actor=actor, qf1=qf1, target=qf1_target, alpha=alpha, log_alpha=log_alpha, a=a_optimizer, q=q_optimizer,
        returns=returns, obs=obs, rewards=rb.rewards, pos=rb.pos,
    )  # fmt: skip
