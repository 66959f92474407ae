"""A hook on all modules collects their activations' means into a global dict; the step regularizes with it."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

MEANS = {}


def record(module, inputs, output):
    if isinstance(module, nn.Linear):
        old = MEANS.get(id(module) and module.tag, torch.zeros(()))
        MEANS[module.tag] = 0.9 * old + 0.1 * output.detach().mean()


def main():
    job = relight.init()
    torch.manual_seed(10)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    for tag, layer in (("in", net[0]), ("out", net[2])):
        layer.tag = tag
    nn.modules.module.register_module_forward_hook(record)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :4].sin()).square().mean()
            loss = loss * (1 + sum(MEANS.values()).abs())
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, means=[MEANS[k] for k in sorted(MEANS)])


if __name__ == "__main__":
    main()
