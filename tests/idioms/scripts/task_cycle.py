"""Several tasks in turn by itertools.cycle, with a head and a weight of uncertainty for each."""

# ranks: 2
import itertools

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class MultiTask(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        self.trunk = nn.Linear(6, 12)
        self.heads = nn.ModuleDict({name: nn.Linear(12, size) for name, size in tasks.items()})
        self.log_vars = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in tasks})

    def forward(self, x, task):
        return self.heads[task](torch.tanh(self.trunk(x))), self.log_vars[task]


job = relight.init()
torch.manual_seed(13)
tasks = {"segment": 3, "depth": 1, "normal": 2}
model = DDP(MultiTask(tasks), find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
turn = itertools.cycle(tasks)
for step in training.steps(until=15):
    with step as x:
        task = next(turn)
        out, log_var = model(x, task)
        optimizer.zero_grad()
        (torch.exp(-log_var) * out.square().mean() + log_var).backward()
        optimizer.step()
finish(job, model=model, optimizer=optimizer)
