"""An optimizer that keeps a count, as a tensor, and a sum of its own beside the states of its parameters (MADGRAD)."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class DualAveraging(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.state["k"] = torch.zeros(1, dtype=torch.long)
        self.state["steps"] = 0

    @torch.no_grad()
    def step(self):
        rate = (self.state["k"].item() + 1) ** 0.5
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["sum"], state["x0"] = torch.zeros_like(p), p.clone()
                state["sum"].add_(p.grad, alpha=group["lr"] * rate)
                p.copy_(state["x0"] - state["sum"] / (1 + 0.1 * self.state["steps"]))
        self.state["k"] += 1
        self.state["steps"] += 1


def main():
    job = relight.init()
    torch.manual_seed(37)
    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))
    model = DDP(net)
    optimizer = DualAveraging(model.parameters())
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 5))
    for step in training.steps(until=18):
        with step as x:
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, steps=optimizer.state["steps"], k=optimizer.state["k"])


if __name__ == "__main__":
    main()
