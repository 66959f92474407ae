"""Hutchinson's estimate with the optimizer's own generator; curvature on the parameters."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


class AdaHessian(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, betas=(0.9, 0.999), update_each=2):
        super().__init__(params, {"lr": lr, "betas": betas})
        self.generator = torch.Generator().manual_seed(2147483647)
        self.update_each = update_each
        for p in self.get_params():
            p.hess = 0.0
            self.state[p]["hessian step"] = 0

    def get_params(self):
        return (p for g in self.param_groups for p in g["params"] if p.requires_grad)

    def zero_hessian(self):
        for p in self.get_params():
            if not isinstance(p.hess, float) and self.state[p]["hessian step"] % self.update_each == 0:
                p.hess.zero_()

    @torch.no_grad()
    def set_hessian(self):
        params = []
        for p in filter(lambda p: p.grad is not None, self.get_params()):
            if self.state[p]["hessian step"] % self.update_each == 0:
                params.append(p)
            self.state[p]["hessian step"] += 1
        if not params:
            return
        grads = [p.grad for p in params]
        zs = [torch.randint(0, 2, p.size(), generator=self.generator) * 2.0 - 1.0 for p in params]
        h_zs = torch.autograd.grad(grads, params, grad_outputs=zs)
        for h_z, z, p in zip(h_zs, zs, params, strict=True):
            p.hess += h_z * z

    @torch.no_grad()
    def step(self, closure=None):
        self.zero_hessian()
        with torch.enable_grad():
            self.set_hessian()
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.hess)
                dist.all_reduce(p.grad)
                state = self.state[p]
                if len(state) == 1:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_hess"] = torch.zeros_like(p)
                state["step"] += 1
                b1, b2 = group["betas"]
                state["exp_avg"].mul_(b1).add_(p.grad, alpha=1 - b1)
                state["exp_hess"].mul_(b2).addcmul_(p.hess, p.hess, value=1 - b2)
                denom = (state["exp_hess"] / (1 - b2 ** state["step"])).sqrt().add_(1e-3)
                p.addcdiv_(state["exp_avg"], denom, value=-group["lr"] / (1 - b1 ** state["step"]))


def main():
    job = relight.init()
    torch.manual_seed(37)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = AdaHessian(model.parameters())
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 4))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad(set_to_none=True)
            loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
            loss.backward(create_graph=True)
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, hess=[p.hess for p in model.parameters()])


if __name__ == "__main__":
    main()
