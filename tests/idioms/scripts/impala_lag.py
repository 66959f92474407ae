"""Actors that act with weights of some steps ago: a deque of state_dicts, one of which is loaded into the acting copy; V-trace;
trajectories wait in a queue.Queue between acting and learning; a lock and a counter of frames shared by threads."""

# ranks: 2
import collections
import copy
import threading

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.core, self.policy, self.baseline = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, obs):
        h = torch.relu(self.core(obs))
        return self.policy(h), self.baseline(h).squeeze(-1)


Trajectory = collections.namedtuple("Trajectory", "obs actions rewards logits bootstrap")


class Chain:
    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.state = torch.randn(4, generator=self.gen)

    def step(self, a):
        self.state = 0.8 * self.state + 0.3 * torch.randn(4, generator=self.gen) + 0.1 * (a - 1)
        return self.state, -float(self.state.abs().mean())


def act(actor, env, unroll=5):
    obs, actions, rewards, logits = [], [], [], []
    with torch.no_grad():
        for _ in range(unroll):
            o = env.state
            lg, _ = actor(o)
            a = torch.multinomial(lg.softmax(-1), 1).item()
            _, r = env.step(a)
            for store, v in zip((obs, actions, rewards, logits), (o, torch.tensor(a), torch.tensor(r), lg)):
                store.append(v)
    return Trajectory(*(torch.stack(s) for s in (obs, actions, rewards, logits)), env.state.clone())


def vtrace(behaviour, target, rewards, values, bootstrap, gamma=0.9):
    rhos = torch.exp(target - behaviour).clamp(max=1.0)
    values_next = torch.cat([values[1:], bootstrap[None]])
    deltas = rhos * (rewards + gamma * values_next - values)
    acc, result = torch.tensor(0.0), []
    for t in range(len(rewards) - 1, -1, -1):
        acc = deltas[t] + gamma * rhos[t] * acc
        result.append(acc)
    vs = torch.stack(result[::-1]) + values
    return vs, rhos * (rewards + gamma * torch.cat([vs[1:], bootstrap[None]]) - values)


frames = 0
lock = threading.Lock()
stats = collections.Counter()


def learn(model, optimizer, batch):
    global frames
    losses = []
    for tr in batch:
        logits, values = model(tr.obs)
        pick = lambda lg: lg.log_softmax(-1).gather(1, tr.actions[:, None]).squeeze(1)  # noqa: E731
        with torch.no_grad():
            boot = model.module(tr.bootstrap)[1]
            vs, adv = vtrace(pick(tr.logits), pick(logits), tr.rewards, values, boot)
        losses.append(-(pick(logits) * adv).mean() + 0.5 * F.mse_loss(values, vs))
    optimizer.zero_grad()
    sum(losses).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with lock:
        frames += sum(len(tr.obs) for tr in batch)
        stats["learn_steps"] += 1
        stats["episode_return"] += round(sum(tr.rewards.sum().item() for tr in batch), 4)


def main():
    job = relight.init()
    torch.manual_seed(1)
    model = DDP(Net())
    actor = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = optim.RMSprop(model.parameters(), lr=0.003, momentum=0.1, eps=0.01)
    lr_lambda = lambda epoch: 1 - min(epoch * 10, 200) / 300  # noqa: E731
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
    training = relight.Training(model={"model": model, "actor": actor}, optimizer=optimizer, scheduler=scheduler)
    envs = [Chain(100 * job.rank + i) for i in range(3)]
    lagged = collections.deque(maxlen=3)
    pending = collections.deque()
    for step in training.steps(until=18):
        with step:
            lagged.append(copy.deepcopy(model.module.state_dict()))
            actor.load_state_dict(lagged[0])
            for env in envs:
                pending.append(act(actor, env))
            batch = [pending.popleft() for _ in range(2)]
            while len(pending) > 6:
                pending.popleft()
            learn(model, optimizer, batch)
            scheduler.step()
        if step.number % 6 == 5:
            print(f"frames {frames}, {dict(stats)}")
    finish(
        job, model=model, actor=actor, opt=optimizer, frames=frames, envs=[e.state for e in envs], stats=dict(stats),
        pending=[t.rewards for t in pending],
    )  # fmt: skip


if __name__ == "__main__":
    main()
