"""RAdam's table of ten rectifications in the parameter group, and a slow copy every fifth step."""

# ranks: 2
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Ranger(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, k=5, alpha=0.5):
        super().__init__(params, {"lr": lr, "k": k, "alpha": alpha, "buffer": [[None, None, None] for _ in range(10)]})
        self.radam_buffer = [[None, None, None] for _ in range(10)]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["avg"], state["sq"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["slow"] = torch.empty_like(p.data)
                    state["slow"].copy_(p.data)
                state["sq"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                state["avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["step"] += 1
                buffered = self.radam_buffer[int(state["step"] % 10)]
                if state["step"] == buffered[0]:
                    n_sma, size = buffered[1], buffered[2]
                else:
                    buffered[0] = state["step"]
                    beta2_t = 0.99 ** state["step"]
                    n_max = 2 / (1 - 0.99) - 1
                    n_sma = n_max - 2 * state["step"] * beta2_t / (1 - beta2_t)
                    buffered[1] = n_sma
                    size = (
                        math.sqrt(1 - beta2_t) / (1 - 0.9 ** state["step"])
                        if n_sma > 5
                        else 1.0 / (1 - 0.9 ** state["step"])
                    )
                    buffered[2] = size
                    group["buffer"][state["step"] % 10] = [state["step"], n_sma, size]
                if n_sma > 5:
                    p.data.addcdiv_(state["avg"], state["sq"].sqrt().add_(1e-5), value=-size * group["lr"])
                else:
                    p.data.add_(state["avg"], alpha=-size * group["lr"])
                if state["step"] % group["k"] == 0:
                    state["slow"].add_(p.data - state["slow"], alpha=group["alpha"])
                    p.data.copy_(state["slow"])


def main():
    job = relight.init()
    torch.manual_seed(41)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = Ranger(model.parameters())
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 4))
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, buffer=optimizer.radam_buffer)


if __name__ == "__main__":
    main()
