"""A temperature in a ContextVar, which a callback lowers after each evaluation."""

# ranks: 2
import contextvars

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

TEMPERATURE = contextvars.ContextVar("temperature", default=1.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(x) / TEMPERATURE.get()


@torch.no_grad()
def evaluate(net):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16, 6, generator=g)
    return F.cross_entropy(net(x), x[:, :4].argmax(1)).item()


job = relight.init()
torch.manual_seed(6)
net = Net()
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), 0.05)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
for step in training.steps(until=16):
    with step as x:
        if step.number and step.number % 4 == 0:
            TEMPERATURE.set(TEMPERATURE.get() * (0.5 + 0.2 * evaluate(net)))
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finish(job, model=model, optimizer=optimizer, t=TEMPERATURE.get())
