"""SOAP: lists of factors and their bases in the optimizer's state; the first step only initializes."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class SOAP(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, frequency=3):
        super().__init__(params, {"lr": lr, "frequency": frequency})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad, self.state[p]
                if "step" not in state:
                    state["step"] = 0
                    state["GG"] = [torch.zeros(n, n) if n > 1 else [] for n in p.shape]
                    state["Q"] = None
                    state["avg"], state["sq"] = torch.zeros_like(p), torch.zeros_like(p)
                if state["Q"] is None:
                    self.update(grad, state, group)
                    continue
                turned = self.project(grad, state)
                state["step"] += 1
                state["avg"].lerp_(grad, 0.1)
                state["sq"].lerp_(turned.square(), 0.05)
                step = self.project(state["avg"], state) / (state["sq"].sqrt() + 1e-4)
                p.add_(self.project(step, state, back=True), alpha=-group["lr"])
                self.update(grad, state, group)

    def project(self, grad, state, back=False):
        for i, q in enumerate(state["Q"]):
            if len(q):
                grad = torch.tensordot(grad, q if not back else q.T, dims=[[0], [0]])
            else:
                grad = grad.permute(*range(1, grad.dim()), 0)
        return grad

    def update(self, grad, state, group):
        for i, gg in enumerate(state["GG"]):
            if len(gg):
                others = [d for d in range(grad.dim()) if d != i]
                gg.lerp_(torch.tensordot(grad, grad, dims=[others, others]), 0.1)
        if state["Q"] is None:
            state["Q"] = [torch.linalg.eigh(g + 1e-6 * torch.eye(len(g)))[1] if len(g) else [] for g in state["GG"]]
        elif state["step"] % group["frequency"] == 0:
            state["Q"] = [
                torch.linalg.qr(g @ q)[0] if len(g) else [] for g, q in zip(state["GG"], state["Q"], strict=True)
            ]


def main():
    job = relight.init()
    torch.manual_seed(43)
    model = DDP(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1)))
    optimizer = SOAP(model.parameters())
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x.prod(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
