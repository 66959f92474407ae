"""The phase of training is a function, the policy a bound method, the schedule a partial."""

# ranks: 2
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def warm(scale, x):
    return x * scale


def main_phase(scale, x):
    return x.sin() + scale


class Agent:
    def __init__(self, model):
        self.model = model
        self.act = self.explore
        self.calls = {"explore": 0, "exploit": 0}
        self.weight = partial(warm, 0.5)

    def explore(self, x):
        self.calls["explore"] += 1
        return self.model(x) + torch.randn(x.shape[0], 3) * 0.1

    def exploit(self, x):
        self.calls["exploit"] += 1
        return self.model(x)


def main():
    job = relight.init()
    torch.manual_seed(13)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    agent = Agent(model)
    phase = warm
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=14):
        with step as x:
            if step.number == 4:
                phase = main_phase
            if step.number == 6:
                agent.act = agent.exploit
                agent.weight = partial(main_phase, 0.25)
            optimizer.zero_grad()
            (agent.act(agent.weight(x)) - phase(0.3, x)[:, :3]).square().mean().backward()
            optimizer.step()
    finish(job, model=model, calls=agent.calls, act=agent.act.__name__)


if __name__ == "__main__":
    main()
