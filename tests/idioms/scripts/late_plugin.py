"""A plugin: a module that a step makes with types.ModuleType, and whose functions later steps call."""

# ranks: 2
import sys
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

SOURCE = """
calls = 0
scale = 1.0

def transform(x):
    global calls, scale
    calls += 1
    scale *= 0.95
    return x * scale
"""


def load_plugin():
    if "my_plugin" not in sys.modules:
        plugin = types.ModuleType("my_plugin")
        exec(SOURCE, plugin.__dict__)
        sys.modules["my_plugin"] = plugin
    return sys.modules["my_plugin"]


job = relight.init()
torch.manual_seed(4)
model = DDP(nn.Linear(6, 4))
optimizer = torch.optim.Adam(model.parameters(), 0.05)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
for step in training.steps(until=16):
    with step as x:
        if step.number >= 4:
            x = load_plugin().transform(x)
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finish(job, model=model, optimizer=optimizer, calls=load_plugin().calls)
