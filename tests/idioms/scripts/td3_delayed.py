"""TD3: two critics in every step, the actor and all targets in every second one only, exploration noise that decays."""

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def mlp(inp, out):
    return nn.Sequential(nn.Linear(inp, 12), nn.ReLU(), nn.Linear(12, out))


class TD3:
    def __init__(self, policy_freq=2, tau=0.05):
        self.actor, self.critic_1, self.critic_2 = mlp(3, 1), mlp(4, 1), mlp(4, 1)
        self.targets = nn.ModuleList(copy.deepcopy(m) for m in (self.actor, self.critic_1, self.critic_2))
        self.actor, self.critic_1, self.critic_2 = DDP(self.actor), DDP(self.critic_1), DDP(self.critic_2)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        critics = [*self.critic_1.parameters(), *self.critic_2.parameters()]
        self.critic_optimizer = torch.optim.Adam(critics, lr=3e-3)
        self.policy_freq, self.tau, self.noise = policy_freq, tau, 0.4
        self.total_it, self.actor_loss = 0, None

    def train(self, state):
        self.total_it += 1
        with torch.no_grad():
            action = self.actor(state).tanh()
            action = (action + torch.randn_like(action) * self.noise).clamp(-1, 1)
            reward, next_state = -(state.sum(1, keepdim=True) - action).abs(), state + 0.1 * action
            t_actor, t_1, t_2 = self.targets
            smooth = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
            following = torch.cat([next_state, (t_actor(next_state).tanh() + smooth).clamp(-1, 1)], 1)
            target_q = reward + 0.9 * torch.min(t_1(following), t_2(following))
        sa = torch.cat([state, action], 1)
        critic_loss = nn.functional.mse_loss(self.critic_1(sa), target_q)
        critic_loss = critic_loss + nn.functional.mse_loss(self.critic_2(sa), target_q)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        if self.total_it % self.policy_freq == 0:
            self.actor_loss = -self.critic_1.module(torch.cat([state, self.actor(state).tanh()], 1)).mean()
            self.actor_optimizer.zero_grad()
            self.actor_loss.backward()
            self.actor_optimizer.step()
            self.noise = max(0.1, self.noise * 0.95)
            for target, live in zip(self.targets, (self.actor, self.critic_1, self.critic_2)):
                for tp, p in zip(target.parameters(), live.module.parameters()):
                    tp.data.copy_(self.tau * p.data + (1 - self.tau) * tp.data)


job = relight.init()
torch.manual_seed(31)
agent = TD3()
training = relight.Training(
    model={"actor": agent.actor, "c1": agent.critic_1, "c2": agent.critic_2, "targets": agent.targets},
    optimizer={"actor": agent.actor_optimizer, "critic": agent.critic_optimizer},
    data=lambda n: torch.randn(8, 3),
)
for step in training.steps(until=18):
    with step as state:
        agent.train(state)
finish(job, a=agent.actor, c=agent.critic_1, d=agent.critic_2, t=agent.targets, n=agent.noise, i=agent.total_it)
