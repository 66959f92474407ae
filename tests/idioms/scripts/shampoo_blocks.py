"""Shampoo: lists of matrices in the optimizer's state, inverse roots that are computed anew every few steps."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def _matrix_power(matrix, power):
    u, s, v = torch.svd(matrix)
    return u @ s.pow(power).diag() @ v.t()


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.5, epsilon=1e-3, update_freq=3):
        super().__init__(params, dict(lr=lr, momentum=momentum, epsilon=epsilon, update_freq=update_freq))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.clone(), self.state[p]
                order, original = grad.ndimension(), grad.size()
                if len(state) == 0:
                    state["step"] = 0
                    state["momentum_buffer"] = grad.clone()
                    state["preconditioners"] = [group["epsilon"] * torch.eye(dim) for dim in original]
                    state["inverses"] = [None] * order
                grad.mul_(1 - group["momentum"]).add_(state["momentum_buffer"], alpha=group["momentum"])
                for dim_id, dim in enumerate(original):
                    grad = grad.transpose(0, dim_id).contiguous()
                    transposed = grad.size()
                    grad = grad.view(dim, -1)
                    state["preconditioners"][dim_id].add_(grad @ grad.t())
                    if state["step"] % group["update_freq"] == 0:
                        state["inverses"][dim_id] = _matrix_power(state["preconditioners"][dim_id], -1 / order)
                    grad = state["inverses"][dim_id] @ grad
                    grad = grad.view(transposed).transpose(0, dim_id).contiguous()
                state["step"] += 1
                state["momentum_buffer"] = grad
                p.add_(grad.view(original), alpha=-group["lr"])


job = relight.init()
torch.manual_seed(37)
model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = Shampoo(model.parameters())
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
for step in training.steps(until=18):
    with step as x:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, 3:].exp().clamp(max=3)).backward()
        optimizer.step()
kept = [[s["step"], s["momentum_buffer"], s["preconditioners"], s["inverses"]] for s in optimizer.state.values()]
finish(job, model=model, kept=kept)
