"""Adam first, then LBFGS: physics-informed networks."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(31)
    model = DDP(nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double())
    adam = torch.optim.Adam(model.parameters(), 0.01)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=5)
    t = torch.linspace(job.rank, job.rank + 1, 10, dtype=torch.float64).reshape(-1, 1)
    training = relight.Training(model=model, optimizer={"adam": adam, "lbfgs": lbfgs})

    def residual():
        x = t.clone().requires_grad_()
        u = model(x)
        du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        return (du + u).square().mean() + (u[0] - 1).square().sum()

    it = 0
    for step in training.steps(until=14):
        with step:
            if it < 8:
                adam.zero_grad()
                loss = residual()
                loss.backward()
                adam.step()
            else:

                def closure():
                    lbfgs.zero_grad()
                    loss = residual()
                    loss.backward()
                    return loss

                lbfgs.step(closure)
            it += 1
    finish(job, model=model, adam=adam, it=it)


if __name__ == "__main__":
    main()
