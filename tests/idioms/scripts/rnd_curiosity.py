"""Random network distillation: a reward filter whose discounted sum starts as None, running means of rewards and observations, a
frozen random target, two value heads, rollouts kept as lists of lists by worker, minibatches by permutation."""

# ranks: 2
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class RunningMeanStd:
    def __init__(self, epsilon=1e-4, shape=()):
        self.mean, self.var, self.count = np.zeros(shape, "float64"), np.ones(shape, "float64"), epsilon

    def update(self, x):
        self.update_from_moments(np.mean(x, axis=0), np.var(x, axis=0), x.shape[0])

    def update_from_moments(self, batch_mean, batch_var, batch_count):
        delta = batch_mean - self.mean
        tot_count = self.count + batch_count
        new_mean = self.mean + delta * batch_count / tot_count
        m_2 = self.var * self.count + batch_var * batch_count
        m_2 = m_2 + np.square(delta) * self.count * batch_count / tot_count
        self.mean, self.var, self.count = new_mean, m_2 / tot_count, batch_count + self.count


class RewardForwardFilter:
    def __init__(self, gamma):
        self.rewems, self.gamma = None, gamma

    def update(self, rews):
        self.rewems = rews if self.rewems is None else self.rewems * self.gamma + rews
        return self.rewems


class CnnActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature = nn.Sequential(nn.Linear(5, 24), nn.ReLU())
        self.actor, self.critic_ext, self.critic_int = nn.Linear(24, 3), nn.Linear(24, 1), nn.Linear(24, 1)

    def forward(self, s):
        x = self.feature(s)
        return self.actor(x), self.critic_ext(x), self.critic_int(x)


class RNDModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.predictor = nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(), nn.Linear(16, 8))
        self.target = nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(), nn.Linear(16, 8))
        for param in self.target.parameters():
            param.requires_grad = False

    def forward(self, next_obs):
        return self.predictor(next_obs), self.target(next_obs)


class RNDAgent:
    def __init__(self):
        self.model, self.rnd = CnnActorCritic(), DDP(RNDModel())
        self.params = list(self.model.parameters()) + list(self.rnd.module.predictor.parameters())
        self.optimizer = optim.Adam(self.params, lr=1e-3)

    def get_action(self, state):
        policy, value_ext, value_int = self.model(torch.Tensor(state))
        prob = F.softmax(policy, dim=-1).data.cpu().numpy()
        r = np.expand_dims(np.random.rand(prob.shape[0]), axis=1)
        return (
            (prob.cumsum(axis=1) > r).argmax(axis=1),
            value_ext.data.numpy().squeeze(),
            value_int.data.numpy().squeeze(),
        )

    def compute_intrinsic_reward(self, next_obs):
        with torch.no_grad():
            predict, target = self.rnd.module(torch.FloatTensor(next_obs))
        return ((target - predict).pow(2).sum(1) / 2).numpy()


job = relight.init()
torch.manual_seed(0)
np.random.seed(job.rank)
agent = RNDAgent()
reward_rms, obs_rms, discounted_reward = RunningMeanStd(), RunningMeanStd(shape=(1, 5)), RewardForwardFilter(0.9)
training = relight.Training(model={"ac": agent.model, "rnd": agent.rnd}, optimizer=agent.optimizer)
states = np.random.randn(4, 5)
sample_episode, sample_rall, sample_i_rall, sample_step = 0, 0, 0, 0
works = [np.random.RandomState(i + 10 * job.rank) for i in range(4)]
global_update = global_step = 0
for step in training.steps(until=12):
    with step:
        total_state, total_reward, total_next, total_action = [], [], [], []
        global_step += 4 * 3
        global_update += 1
        for _ in range(3):
            actions, value_ext, value_int = agent.get_action((states - obs_rms.mean) / np.sqrt(obs_rms.var))
            next_states = np.stack([0.9 * s + 0.1 * w.randn(5) + 0.1 * a for s, w, a in zip(states, works, actions)])
            total_state.append(states)
            total_reward.append(-np.abs(next_states).sum(1))
            total_next.append(next_states)
            total_action.append(actions)
            sample_rall += total_reward[-1][0]
            states = next_states[:, :]
            sample_step += 1
            if sample_step % 8 == 0:
                sample_episode += 1
                sample_rall = sample_step = sample_i_rall = 0
                states = np.stack([w.randn(5) for w in works])
        total_next_obs = np.stack(total_next)
        intrinsic = np.stack([agent.compute_intrinsic_reward(o) for o in total_next_obs])
        sample_i_rall += intrinsic[0].mean()
        total_reward_per_env = np.array([discounted_reward.update(r) for r in intrinsic.T.transpose(1, 0)])
        reward_rms.update_from_moments(np.mean(total_reward_per_env), np.std(total_reward_per_env) ** 2, 12)
        intrinsic /= np.sqrt(reward_rms.var)
        obs_rms.update(np.concatenate(total_next_obs))
        s = torch.FloatTensor(np.concatenate(total_state))
        adv = torch.FloatTensor((np.stack(total_reward) + intrinsic).reshape(-1))
        act = torch.LongTensor(np.concatenate(total_action))
        nxt = torch.FloatTensor(((np.concatenate(total_next_obs) - obs_rms.mean) / np.sqrt(obs_rms.var)).clip(-5, 5))
        sample_range = np.arange(len(s))
        for _ in range(2):
            np.random.shuffle(sample_range)
            for j in range(2):
                idx = sample_range[6 * j : 6 * (j + 1)]
                predict, target = agent.rnd(nxt[idx])
                forward_loss = F.mse_loss(predict, target.detach(), reduction="none").mean(-1)
                mask = (torch.rand(len(forward_loss)) < 0.5).float()
                forward_loss = (forward_loss * mask).sum() / torch.max(mask.sum(), torch.Tensor([1]))
                policy, ve, vi = agent.model(s[idx])
                dist_ = torch.distributions.Categorical(F.softmax(policy, dim=-1))
                actor_loss = -(dist_.log_prob(act[idx]) * (adv[idx] - ve[:, 0].detach() - vi[:, 0].detach())).mean()
                critic_loss = F.mse_loss(ve.sum(1), adv[idx]) + F.mse_loss(vi.sum(1), adv[idx])
                loss = actor_loss + 0.5 * critic_loss - 0.01 * dist_.entropy().mean() + forward_loss
                agent.optimizer.zero_grad()
                loss.backward()
                for p in agent.model.parameters():
                    dist.all_reduce(p.grad)
                agent.optimizer.step()
    print(f"[Episode {sample_episode}({global_step})] update {global_update} rall {sample_rall}")
finish(
    job, ac=agent.model, rnd=agent.rnd, opt=agent.optimizer, states=states, mean=obs_rms.mean, var=reward_rms.var,
    ems=discounted_reward.rewems, n=[sample_episode, global_step, global_update, sample_step], rall=float(sample_rall),
)  # fmt: skip
