"""A flow whose layers invert their batch statistics, dequantized data, and the best weights restored after patience."""

# ranks: 2
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class BatchNormFlow(nn.Module):
    def __init__(self, dim, momentum=0.1, eps=1e-5):
        super().__init__()
        self.log_gamma, self.beta = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.momentum, self.eps = momentum, eps
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(self, x):
        if self.training:
            self.batch_mean, self.batch_var = x.mean(0), (x - x.mean(0)).pow(2).mean(0) + self.eps
            self.running_mean.mul_(self.momentum).add_(self.batch_mean.data * (1 - self.momentum))
            self.running_var.mul_(self.momentum).add_(self.batch_var.data * (1 - self.momentum))
            mean, var = self.batch_mean, self.batch_var
        else:
            mean, var = self.running_mean, self.running_var
        y = torch.exp(self.log_gamma) * (x - mean) / var.sqrt() + self.beta
        return y, (self.log_gamma - 0.5 * torch.log(var)).sum().expand(len(x))


class Coupling(nn.Module):
    def __init__(self, dim, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.s = nn.Sequential(nn.Linear(dim, 12), nn.Tanh(), nn.Linear(12, dim))
        self.t = nn.Sequential(nn.Linear(dim, 12), nn.ReLU(), nn.Linear(12, dim))

    def forward(self, x):
        m = x * self.mask
        s, t = self.s(m) * (1 - self.mask), self.t(m) * (1 - self.mask)
        return x * s.exp() + t, s.sum(1)


class Flow(nn.Module):
    def __init__(self, dim=4, n=3):
        super().__init__()
        mask = torch.arange(dim) % 2
        layers = []
        for _ in range(n):
            layers += [Coupling(dim, mask.float()), BatchNormFlow(dim)]
            mask = 1 - mask
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        total = 0
        for layer in self.layers:
            x, logdet = layer(x)
            total = total + logdet
        return (-0.5 * x.pow(2).sum(1) + total).mean()


class EarlyStopper:
    def __init__(self, model, patience):
        self.model, self.patience, self.best_loss, self.best_epoch, self.best_state = (
            model,
            patience,
            float("inf"),
            0,
            None,
        )
        self.restored = 0

    def check(self, loss, epoch, optimizer):
        if loss < self.best_loss:
            self.best_loss, self.best_epoch = loss, epoch
            self.best_state = copy.deepcopy(self.model.state_dict())
        elif epoch - self.best_epoch >= self.patience:
            self.model.load_state_dict(self.best_state)
            self.best_epoch = epoch
            self.restored += 1
            for group in optimizer.param_groups:
                group["lr"] /= 2
            optimizer.state.clear()


def evaluate(model, data):
    model.eval()
    with torch.no_grad():
        loss = -model(data)
    model.train()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(5)
    flow = Flow()
    model = DDP(flow, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-6)
    stopper, valid = EarlyStopper(flow, 2), torch.randn(16, 4)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randint(0, 4, (16, 4)).float())
    history = []
    for step in training.steps(until=18):
        with step as x:
            if step.number and step.number % 2 == 0:
                history.append(evaluate(flow, valid))
                stopper.check(history[-1], step.number // 2, optimizer)
            x = (x + torch.rand_like(x)) / 4 - 0.5
            loss = -model(x)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    finish(job, flow=model, opt=optimizer, history=history, best=stopper.best_state, restored=stopper.restored)
