"""A model's head is another module in each task, taken from a list."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))
        self.active = 0

    def forward(self, x):
        return self.heads[self.active](self.body(x).tanh())


def main():
    job = relight.init()
    torch.manual_seed(19)
    net = Net()
    model = DDP(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    head, task = net.heads[0], 0
    for step in training.steps(until=15):
        with step as x:
            if step.number and step.number % 4 == 0:
                task = (task + 1) % 3
                net.active = task
                nn.init.zeros_(head.bias)
                head = net.heads[task]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), (x[:, task] > 0).long()) + 0.01 * head.weight.square().sum()
            loss.backward()
            optimizer.step()
    finish(job, net=net, optimizer=optimizer, task=task)


if __name__ == "__main__":
    main()
