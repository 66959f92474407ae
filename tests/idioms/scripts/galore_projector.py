"""GaLore: the optimizer's state holds objects of a class of its own, with matrices that are made anew now and then."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class GaLoreProjector:
    def __init__(self, rank, update_proj_gap=5, scale=1.0):
        self.rank, self.update_proj_gap, self.scale = rank, update_proj_gap, scale
        self.ortho_matrix = None

    def project(self, full_rank_grad, iter):
        if self.ortho_matrix is None or iter % self.update_proj_gap == 0:
            _, _, vh = torch.linalg.svd(full_rank_grad, full_matrices=False)
            self.ortho_matrix = vh[: self.rank]
        return full_rank_grad @ self.ortho_matrix.t()

    def project_back(self, low_rank_grad):
        return low_rank_grad @ self.ortho_matrix * self.scale


class GaLoreAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-6):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if "step" not in state:
                    state["step"] = 0
                if "rank" in group:
                    if "projector" not in state:
                        state["projector"] = GaLoreProjector(group["rank"])
                    grad = state["projector"].project(grad, state["step"])
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
                beta1, beta2 = group["betas"]
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                norm_grad = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(group["eps"])
                if "rank" in group:
                    norm_grad = state["projector"].project_back(norm_grad)
                p.add_(norm_grad, alpha=-group["lr"])


job = relight.init()
torch.manual_seed(23)
model = DDP(nn.Sequential(nn.Linear(10, 12), nn.SiLU(), nn.Linear(12, 4)))
galore = [p for p in model.parameters() if p.dim() == 2]
regular = [p for p in model.parameters() if p.dim() != 2]
optimizer = GaLoreAdamW([{"params": regular}, {"params": galore, "rank": 3}])
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 10))
for step in training.steps(until=18):
    with step as x:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :4].tanh()).backward()
        optimizer.step()
projectors = [optimizer.state[p]["projector"].ortho_matrix for p in galore]
finish(job, model=model, projectors=projectors, averages=[optimizer.state[p]["exp_avg"] for p in galore + regular])
