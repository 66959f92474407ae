"""An optimizer that adds up over its own state, in the order in which parameters came into it."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Scaled(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in reversed(self.param_groups):
            for p in reversed(group["params"]):
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["avg"] = torch.zeros_like(p)
                state["avg"].lerp_(p.grad, 0.2)
                state["norm"] = float(state["avg"].norm())
        total = 0.0
        for state in self.state.values():
            total = total * 0.999 + state["norm"]
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    p.add_(self.state[p]["avg"], alpha=-group["lr"] / (1.0 + total))


def main():
    job = relight.init()
    torch.manual_seed(23)
    model = DDP(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 2)))
    optimizer = Scaled([{"params": model.module[:3].parameters()}, {"params": model.module[3:].parameters()}])
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
