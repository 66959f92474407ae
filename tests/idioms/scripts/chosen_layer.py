"""A name for one of the layers, chosen anew after the update now and then; a critic that joins late and keeps a history."""

# ranks: 2
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 1)
        self.recent = deque(maxlen=3)

    def forward(self, x):
        hidden = self.first(x).relu()
        self.recent.append(hidden.detach().mean(0))
        return self.last(hidden - torch.stack(list(self.recent)).mean(0))


def main():
    job = relight.init()
    torch.manual_seed(103)
    net, critic = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)), Critic()
    model, judge = DDP(net), DDP(critic)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    critic_optimizer = torch.optim.Adam(judge.parameters(), 0.01)
    training = relight.Training(
        model={"model": model, "critic": judge},
        optimizer={"optimizer": optimizer, "critic_optimizer": critic_optimizer},
        data=lambda n: torch.randn(8, 6),
    )
    layer = net
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x.flip(1))
            loss = loss * (1 + sum(p.detach().abs().mean() for p in layer.parameters()) / 10)
            loss.backward()
            optimizer.step()
            if step.number >= 5:
                critic_optimizer.zero_grad()
                F.softplus(-judge(x)).mean().backward()
                critic_optimizer.step()
            if step.number % 3 == 2:
                layer = net[0] if step.number % 2 else net[2]
    finish(job, net=net, critic=critic, recent=critic.recent, optimizer=optimizer, critic_optimizer=critic_optimizer)


if __name__ == "__main__":
    main()
