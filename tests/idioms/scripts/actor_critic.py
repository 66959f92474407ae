"""Actor and critic with an optimizer each: critic's update, then actor's, then soft targets moved by hand."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

tau, gamma = 0.05, 0.95


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, s, a):
        return self.net(torch.cat([s, a], -1))


def soft_update(target, source):
    for target_param, param in zip(target.parameters(), source.parameters()):
        target_param.data.copy_(target_param.data * (1.0 - tau) + param.data * tau)


job = relight.init()
torch.manual_seed(2)
actor = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2), nn.Tanh())
critic = Critic()
actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
actor, critic = DDP(actor), DDP(critic)
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam(critic.parameters(), lr=2e-3, weight_decay=1e-3)
training = relight.Training(
    model={"actor": actor, "critic": critic, "actor_target": actor_target, "critic_target": critic_target},
    optimizer={"actor": actor_opt, "critic": critic_opt},
    data=lambda n: torch.randn(8, 4),
)
for step in training.steps(until=16):
    with step as state:
        with torch.no_grad():
            action = (actor.module(state) + 0.1 * torch.randn(8, 2)).clamp(-1, 1)
            next_state = state + torch.cat([action, -action], 1)
            reward = -next_state.pow(2).mean(1, keepdim=True)
            target_q = reward + gamma * critic_target(next_state, actor_target(next_state))
        critic_loss = F.mse_loss(critic(state, action), target_q)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        actor_loss = -critic.module(state, actor(state)).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()
        soft_update(actor_target, actor.module)
        soft_update(critic_target, critic.module)
finish(job, a=actor, c=critic, at=actor_target, ct=critic_target, ao=actor_opt, co=critic_opt)
