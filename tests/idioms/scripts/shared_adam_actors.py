"""A3C's shared optimizer with state made in its constructor, LSTM states by actor, sequences in a dict, a global counter."""

# ranks: 2
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

COUNTER = 0
EPISODES = {}


def normalized_columns_initializer(weights, std=1.0):
    out = torch.randn(weights.size())
    return out * std / torch.sqrt(out.pow(2).sum(1, keepdim=True))


class SharedAdam(torch.optim.Adam):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0):
        super().__init__(params, lr, betas, eps, weight_decay)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"], state["exp_avg"], state["exp_avg_sq"] = (
                    torch.zeros(1),
                    p.data.new().resize_as_(p.data).zero_(),
                    p.data.new().resize_as_(p.data).zero_(),
                )

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.data, self.state[p]
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                beta1, beta2 = group["betas"]
                state["step"] += 1
                exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denom = exp_avg_sq.sqrt().add_(group["eps"])
                c1, c2 = 1 - beta1 ** state["step"].item(), 1 - beta2 ** state["step"].item()
                p.data.addcdiv_(exp_avg, denom, value=-group["lr"] * math.sqrt(c2) / c1)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTMCell(3, 8)
        self.critic_linear, self.actor_linear = nn.Linear(8, 1), nn.Linear(8, 2)
        self.actor_linear.weight.data = normalized_columns_initializer(self.actor_linear.weight.data, 0.01)
        self.actor_linear.bias.data.fill_(0)

    def forward(self, states, hx, cx):
        values, logits = [], []
        for s in states:
            hx, cx = self.lstm(s, (hx, cx))
            values.append(self.critic_linear(hx))
            logits.append(self.actor_linear(hx))
        return torch.stack(values), torch.stack(logits), hx, cx


class Env:
    instances = 0

    def __init__(self):
        Env.instances += 1
        self.gen = torch.Generator().manual_seed(Env.instances)
        self.reset()

    def reset(self):
        self.s, self.t = torch.randn(3, generator=self.gen), 0
        return self.s

    def step(self, a):
        self.t += 1
        self.s = 0.8 * self.s + 0.2 * (2 * a - 1) + 0.05 * torch.randn(3, generator=self.gen)
        return self.s, -self.s.abs().sum().item(), self.t > 8


def main():
    global COUNTER
    job = relight.init()
    torch.manual_seed(1)
    envs = [Env() for _ in range(2 + job.rank)][-2:]
    net = ActorCritic()
    model, optimizer = DDP(net), SharedAdam(net.parameters(), lr=0.01)
    state = torch.stack([e.reset() for e in envs])
    hx = cx = torch.zeros(2, 8)
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=15):
        with step:
            hx, cx = hx.detach(), cx.detach()
            h0, c0 = hx, cx
            states, actions, rewards, masks = [], [], [], []
            with torch.no_grad():
                for _ in range(5):
                    _, logit, hx, cx = net(state[None], hx, cx)
                    action = F.softmax(logit[0], -1).multinomial(1)
                    states.append(state)
                    results = [e.step(int(a)) for e, a in zip(envs, action)]
                    COUNTER += 2
                    state = torch.stack([r[0] for r in results])
                    for i, (_, r, done) in enumerate(results):
                        EPISODES.setdefault(i, [0.0])[-1] += r
                        if done:
                            EPISODES[i].append(0.0)
                            state[i] = envs[i].reset()
                            hx, cx = hx.clone(), cx.clone()
                            hx[i], cx[i] = 0, 0
                    actions.append(action)
                    rewards.append(torch.tensor([r[1] for r in results]))
                    masks.append(torch.tensor([0.0 if r[2] else 1.0 for r in results]))
            values, logits, _, _ = model(torch.stack(states), h0, c0)
            R, loss = values[-1].detach()[:, 0], 0
            for i in reversed(range(5)):
                R = rewards[i] + 0.9 * R * masks[i]
                adv = R - values[i][:, 0]
                logp = F.log_softmax(logits[i], -1)
                loss = loss + 0.5 * adv.pow(2).mean() - (logp.gather(1, actions[i])[:, 0] * adv.detach()).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 40)
            optimizer.step()
    finish(
        job,
        model=model,
        opt=optimizer,
        hx=hx,
        cx=cx,
        counter=COUNTER,
        episodes=list(EPISODES.values()),
        state=state,
        rng=[e.gen for e in envs],
    )


if __name__ == "__main__":
    main()
