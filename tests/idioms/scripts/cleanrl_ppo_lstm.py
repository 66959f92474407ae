"""CleanRL's single-file PPO with an LSTM over several processes: storage tensors filled in place, next_obs, next_done and
next_lstm_state from iteration to iteration, gradients flattened and summed by hand, early stop by KL of all ranks."""

# ranks: 2
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributions.categorical import Categorical

import relight
from tests.idioms.digest import finish


@dataclass
class Args:
    seed: int = 1
    learning_rate: float = 2.5e-3
    num_envs: int = 4
    num_steps: int = 8
    anneal_lr: bool = True
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 2
    update_epochs: int = 2
    clip_coef: float = 0.1
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    target_kl: float = 0.02
    num_iterations: int = 14


class SyncVectorEnv:
    def __init__(self, num_envs, seed):
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.returns = num_envs, np.zeros(num_envs, dtype=np.float32)

    def reset(self):
        self.obs = self.rng.normal(size=(self.num_envs, 4)).astype(np.float32)
        return self.obs.copy()

    def step(self, actions):
        self.obs = (
            0.95 * self.obs + 0.1 * (actions[:, None] - 0.5) + 0.05 * self.rng.normal(size=self.obs.shape)
        ).astype(np.float32)
        reward = -np.abs(self.obs).sum(1)
        self.returns += reward
        done = self.rng.random(self.num_envs) < 0.1
        infos = [{"episode": {"r": float(self.returns[i])}} for i in np.where(done)[0]]
        self.returns[done] = 0
        self.obs[done] = self.rng.normal(size=(int(done.sum()), 4))
        return self.obs.copy(), reward, done, infos


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(layer_init(nn.Linear(4, 16)), nn.ReLU())
        self.lstm = nn.LSTM(16, 16)
        self.actor, self.critic = layer_init(nn.Linear(16, 2), std=0.01), layer_init(nn.Linear(16, 1), std=1)

    def get_states(self, x, lstm_state, done):
        hidden = self.network(x).reshape((-1, lstm_state[0].shape[1], 16))
        done = done.reshape((-1, lstm_state[0].shape[1]))
        new_hidden = []
        for h, d in zip(hidden, done):
            keep = (1.0 - d).view(1, -1, 1)
            h, lstm_state = self.lstm(h.unsqueeze(0), (keep * lstm_state[0], keep * lstm_state[1]))
            new_hidden += [h]
        return torch.flatten(torch.cat(new_hidden), 0, 1), lstm_state

    def get_value(self, x, lstm_state, done):
        return self.critic(self.get_states(x, lstm_state, done)[0])

    def get_action_and_value(self, x, lstm_state, done, action=None):
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), lstm_state


if __name__ == "__main__":
    args = Args()
    job = relight.init()
    torch.manual_seed(args.seed)
    envs = SyncVectorEnv(args.num_envs, args.seed + job.rank)
    agent = Agent()
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    training = relight.Training(model=agent, optimizer=optimizer)
    obs = torch.zeros((args.num_steps, args.num_envs, 4))
    actions, logprobs = torch.zeros((args.num_steps, args.num_envs)), torch.zeros((args.num_steps, args.num_envs))
    rewards, dones, values = (torch.zeros((args.num_steps, args.num_envs)) for _ in range(3))
    avg_returns = deque(maxlen=20)
    global_step, start_time = 0, time.time()
    next_obs, next_done = torch.Tensor(envs.reset()), torch.zeros(args.num_envs)
    next_lstm_state = (torch.zeros(1, args.num_envs, 16), torch.zeros(1, args.num_envs, 16))
    for iteration in training.steps(until=args.num_iterations):
        with iteration:
            initial_lstm_state = (next_lstm_state[0].clone(), next_lstm_state[1].clone())
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = (1.0 - iteration.number / args.num_iterations) * args.learning_rate
            for step in range(args.num_steps):
                global_step += args.num_envs * job.world_size
                obs[step], dones[step] = next_obs, next_done
                with torch.no_grad():
                    action, logprob, _, value, next_lstm_state = agent.get_action_and_value(
                        next_obs, next_lstm_state, next_done
                    )
                    values[step] = value.flatten()
                actions[step], logprobs[step] = action, logprob
                new_obs, reward, done, infos = envs.step(action.numpy())
                rewards[step] = torch.tensor(reward)
                next_obs, next_done = torch.Tensor(new_obs), torch.Tensor(done)
                for info in infos:
                    avg_returns.append(info["episode"]["r"])
            with torch.no_grad():
                next_value = agent.get_value(next_obs, next_lstm_state, next_done).reshape(1, -1)
                advantages, lastgaelam = torch.zeros_like(rewards), 0
                for t in reversed(range(args.num_steps)):
                    nonterminal = 1.0 - (next_done if t == args.num_steps - 1 else dones[t + 1])
                    nextvalues = next_value if t == args.num_steps - 1 else values[t + 1]
                    delta = rewards[t] + args.gamma * nextvalues * nonterminal - values[t]
                    advantages[t] = lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
                returns = advantages + values
            envinds = np.arange(args.num_envs)
            flatinds = np.arange(args.num_steps * args.num_envs).reshape(args.num_steps, args.num_envs)
            clipfracs = []
            for _ in range(args.update_epochs):
                np.random.shuffle(envinds)
                for start in range(0, args.num_envs, args.num_envs // args.num_minibatches):
                    mbenvinds = envinds[start : start + args.num_envs // args.num_minibatches]
                    mb_inds = flatinds[:, mbenvinds].ravel()
                    _, newlogprob, entropy, newvalue, _ = agent.get_action_and_value(
                        obs.reshape(-1, 4)[mb_inds],
                        (initial_lstm_state[0][:, mbenvinds], initial_lstm_state[1][:, mbenvinds]),
                        dones.reshape(-1)[mb_inds],
                        actions.reshape(-1).long()[mb_inds],
                    )
                    logratio = newlogprob - logprobs.reshape(-1)[mb_inds]
                    ratio = logratio.exp()
                    approx_kl = ((ratio - 1) - logratio).mean().detach()
                    clipfracs += [((ratio - 1.0).abs() > args.clip_coef).float().mean().item()]
                    mb_adv = advantages.reshape(-1)[mb_inds]
                    mb_adv = (mb_adv - mb_adv.mean()) / (mb_adv.std() + 1e-8)
                    pg_loss = torch.max(
                        -mb_adv * ratio, -mb_adv * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                    ).mean()
                    v_loss = 0.5 * ((newvalue.view(-1) - returns.reshape(-1)[mb_inds]) ** 2).mean()
                    loss = pg_loss - args.ent_coef * entropy.mean() + v_loss * args.vf_coef
                    optimizer.zero_grad()
                    loss.backward()
                    all_grads = torch.cat([p.grad.view(-1) for p in agent.parameters() if p.grad is not None])
                    dist.all_reduce(all_grads, op=dist.ReduceOp.SUM)
                    offset = 0
                    for param in agent.parameters():
                        param.grad.data.copy_(
                            all_grads[offset : offset + param.numel()].view_as(param) / job.world_size
                        )
                        offset += param.numel()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
                dist.all_reduce(approx_kl)
                if approx_kl / job.world_size > args.target_kl:
                    break
    finish(
        job, agent=agent, optimizer=optimizer, global_step=global_step, returns=avg_returns, obs=next_obs,
        lstm=next_lstm_state, env=envs.obs, values=values, clipfracs=clipfracs,
    )  # fmt: skip
