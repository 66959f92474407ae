"""Rainbow: noisy layers whose noise is drawn into buffers before forward, n-step returns in a deque, a distribution of
returns, a target that is loaded now and then, an annealed priority weight as an attribute of the memory."""

# ranks: 2
from collections import deque, namedtuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

Transition = namedtuple("Transition", ("state", "action", "reward", "nonterminal"))


class NoisyLinear(nn.Module):
    def __init__(self, in_features, out_features, std_init=0.5):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight_mu = nn.Parameter(torch.empty(out_features, in_features).uniform_(-0.3, 0.3))
        self.weight_sigma = nn.Parameter(torch.full((out_features, in_features), std_init / in_features**0.5))
        self.register_buffer("weight_epsilon", torch.empty(out_features, in_features))
        self.bias_mu = nn.Parameter(torch.zeros(out_features))
        self.bias_sigma = nn.Parameter(torch.full((out_features,), std_init / out_features**0.5))
        self.register_buffer("bias_epsilon", torch.empty(out_features))
        self.reset_noise()

    def _scale_noise(self, size):
        x = torch.randn(size)
        return x.sign().mul_(x.abs().sqrt_())

    def reset_noise(self):
        epsilon_in, epsilon_out = self._scale_noise(self.in_features), self._scale_noise(self.out_features)
        self.weight_epsilon.copy_(epsilon_out.outer(epsilon_in))
        self.bias_epsilon.copy_(epsilon_out)

    def forward(self, input):
        if self.training:
            return F.linear(
                input,
                self.weight_mu + self.weight_sigma * self.weight_epsilon,
                self.bias_mu + self.bias_sigma * self.bias_epsilon,
            )
        return F.linear(input, self.weight_mu, self.bias_mu)


class DQN(nn.Module):
    def __init__(self, atoms=11, action_space=3):
        super().__init__()
        self.atoms, self.action_space = atoms, action_space
        self.fc_h, self.fc_z_v = NoisyLinear(4, 16), NoisyLinear(16, atoms)
        self.fc_z_a = NoisyLinear(16, action_space * atoms)

    def forward(self, x, log=False):
        h = F.relu(self.fc_h(x))
        v, a = self.fc_z_v(h).view(-1, 1, self.atoms), self.fc_z_a(h).view(-1, self.action_space, self.atoms)
        q = v + a - a.mean(1, keepdim=True)
        return F.log_softmax(q, dim=2) if log else F.softmax(q, dim=2)

    def reset_noise(self):
        for name, module in self.named_children():
            if "fc" in name:
                module.reset_noise()


class ReplayMemory:
    def __init__(self, capacity, n=3, discount=0.99):
        self.capacity, self.n, self.discount = capacity, n, discount
        self.transitions, self.index, self.priority_weight = [None] * capacity, 0, 0.4
        self.recent = deque([], maxlen=n)

    def append(self, state, action, reward, terminal):
        self.recent.append(Transition(state, action, reward, not terminal))
        if len(self.recent) == self.n:
            R = sum(self.discount**k * tr.reward for k, tr in enumerate(self.recent))
            first = self.recent[0]
            self.transitions[self.index % self.capacity] = (first.state, first.action, R, state, float(not terminal))
            self.index += 1
        if terminal:
            self.recent.clear()

    def sample(self, batch_size):
        idxs = np.random.randint(0, min(self.index, self.capacity), size=batch_size)
        states, actions, returns, next_states, nonterminals = zip(*[self.transitions[i] for i in idxs])
        weights = (1.0 / (1 + idxs)) ** self.priority_weight
        return (
            torch.stack(states), torch.tensor(actions), torch.tensor(returns), torch.stack(next_states),
            torch.tensor(nonterminals), torch.tensor(weights / weights.max(), dtype=torch.float32),
        )  # fmt: skip


class Env:
    def __init__(self, seed):
        self.rng = np.random.RandomState(seed)
        self.reset()

    def reset(self):
        self.t, self.state = 0, torch.tensor(self.rng.randn(4), dtype=torch.float32)
        return self.state

    def step(self, action):
        self.t += 1
        self.state = 0.9 * self.state + 0.1 * action + torch.tensor(0.1 * self.rng.randn(4), dtype=torch.float32)
        return self.state, float(self.state.sum().tanh()), self.t % 9 == 0


class Agent:
    def __init__(self):
        self.online_net, self.target_net = DQN(), DQN()
        self.online = DDP(self.online_net)
        self.update_target_net()
        self.target_net.train()
        for param in self.target_net.parameters():
            param.requires_grad = False
        self.support = torch.linspace(-5, 5, 11)
        self.optimiser = torch.optim.Adam(self.online_net.parameters(), lr=1e-3, eps=1.5e-4)

    def reset_noise(self):
        self.online_net.reset_noise()

    def act(self, state):
        with torch.no_grad():
            return (self.online_net(state.unsqueeze(0)) * self.support).sum(2).argmax(1).item()

    def update_target_net(self):
        self.target_net.load_state_dict(self.online_net.state_dict())

    def learn(self, mem):
        states, actions, returns, next_states, nonterminals, weights = mem.sample(8)
        log_ps_a = self.online(states, log=True)[range(8), actions]
        with torch.no_grad():
            argmax = (self.support * self.online_net(next_states)).sum(2).argmax(1)
            self.target_net.reset_noise()
            pns_a = self.target_net(next_states)[range(8), argmax]
            Tz = (returns.unsqueeze(1) + nonterminals.unsqueeze(1) * 0.97 * self.support).clamp(-5, 5)
            b = Tz + 5
            lower, upper = b.floor().long(), b.ceil().long()
            m = torch.zeros(8, 11)
            m.scatter_add_(1, lower, pns_a * (upper + (lower == upper).float() - b))
            m.scatter_add_(1, upper, pns_a * (b - lower))
        loss = -torch.sum(m * log_ps_a, 1)
        self.online_net.zero_grad()
        (weights * loss).mean().backward()
        nn.utils.clip_grad_norm_(self.online_net.parameters(), 10)
        self.optimiser.step()
        return loss.detach()


job = relight.init()
np.random.seed(job.rank)
torch.manual_seed(7)
env, mem, dqn = Env(job.rank), ReplayMemory(40), Agent()
training = relight.Training(model={"online": dqn.online, "target": dqn.target_net}, optimizer=dqn.optimiser)
state, T, losses = env.state, 0, []
for step in training.steps(until=22):
    with step:
        for _ in range(6):
            dqn.reset_noise()
            action = dqn.act(state)
            next_state, reward, done = env.step(action)
            mem.append(state, action, reward, done)
            state = env.reset() if done else next_state
            T += 1
        mem.priority_weight = min(mem.priority_weight + 0.03, 1)
        losses.append(dqn.learn(mem).mean().item())
        if T % 30 == 0:
            dqn.update_target_net()
finish(job, online=dqn.online_net, target=dqn.target_net, optimizer=dqn.optimiser, T=T, losses=losses, state=state)
