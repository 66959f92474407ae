"""A neural ODE: an adaptive solver that remembers its step size, counts of evaluations, an adjoint in a function of its own."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class RunningAverageMeter:
    def __init__(self, momentum=0.9):
        self.momentum = momentum
        self.reset()

    def reset(self):
        self.val, self.avg = None, 0

    def update(self, val):
        self.avg = val if self.val is None else self.avg * self.momentum + val * (1 - self.momentum)
        self.val = val


class ODEfunc(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv1, self.conv2, self.nfe = nn.Linear(dim + 1, 12), nn.Linear(12, dim), 0

    def forward(self, t, x):
        self.nfe += 1
        return self.conv2(torch.tanh(self.conv1(torch.cat([x, t.expand(len(x), 1)], 1))))


class Solver:
    first_step = 0.3  # of all solvers: the last one that was accepted
    rejected = 0

    def __init__(self, func, tol):
        self.func, self.tol = func, tol

    def integrate(self, y, t1=1.0):
        t, h = torch.zeros(1), Solver.first_step
        while t.item() < t1 - 1e-6:
            h = min(h, t1 - t.item())
            k1 = self.func(t, y)
            k2 = self.func(t + h, y + h * k1)
            err = (0.5 * h * (k2 - k1)).abs().max().item()
            if err > self.tol:
                h *= 0.5
                type(self).rejected += 1
                continue
            y, t = y + 0.5 * h * (k1 + k2), t + h
            Solver.first_step = h
            h = min(0.5, h * (0.9 * (self.tol / (err + 1e-9)) ** 0.5))
        return y


class ODEBlock(nn.Module):
    def __init__(self, odefunc):
        super().__init__()
        self.odefunc, self.solver = odefunc, Solver(odefunc, 0.05)

    def forward(self, x):
        return self.solver.integrate(x)

    @property
    def nfe(self):
        return self.odefunc.nfe

    @nfe.setter
    def nfe(self, value):
        self.odefunc.nfe = value


def main():
    job = relight.init()
    torch.manual_seed(16)
    block = ODEBlock(ODEfunc(4))
    model = DDP(nn.Sequential(nn.Linear(3, 4), block, nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    f_nfe, b_nfe, loss_meter = RunningAverageMeter(0.9), RunningAverageMeter(0.9), RunningAverageMeter(0.97)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 3))
    for step in training.steps(until=16):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2] * x[:, 2:]).square().mean()
            nfe_forward, block.nfe = block.nfe, 0
            (loss + 1e-3 * nfe_forward * f_nfe.avg / 10).backward()
            nfe_backward, block.nfe = block.nfe, 0
            f_nfe.update(nfe_forward)
            b_nfe.update(nfe_backward)
            loss_meter.update(loss.item())
            if f_nfe.avg > 12:
                block.solver.tol = min(0.2, block.solver.tol * 1.1)
            optimizer.step()
    finish(
        job,
        model=model,
        opt=optimizer,
        f=f_nfe.avg,
        b=b_nfe.avg,
        loss=loss_meter.avg,
        tol=block.solver.tol,
        h=Solver.first_step,
        rejected=Solver.rejected,
    )


if __name__ == "__main__":
    main()
