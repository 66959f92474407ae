"""torch.compile of the model and of a loss, with graph breaks, a counter, and dynamic shapes."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.width = 0

    def forward(self, x):
        self.calls += 1
        h = torch.relu(self.a(x))
        if h.sum() > 0:
            self.width = x.shape[0]
            h = h * 0.9
        return self.b(h)


def main():
    job = relight.init()
    torch.manual_seed(60)
    net = Net()
    model = torch.compile(DDP(net), backend="eager")

    @torch.compile(backend="eager", dynamic=True)
    def loss_of(out, x):
        return (out - x[:, :2].sin()).square().sum() / x.shape[0]

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(3 + n % 4, 6))
    for step in training.steps(until=12):
        with step as x:
            optimizer.zero_grad()
            loss_of(model(x), x).backward()
            optimizer.step()
    finish(job, model=net, optimizer=optimizer, width=net.width)


if __name__ == "__main__":
    main()
