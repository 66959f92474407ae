"""MAML with inner steps by torch.func.functional_call and gradients of gradients; outer gradients averaged by hand.

No DDP: the script calls all_reduce on each gradient itself.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

import relight
from tests.idioms.digest import finish


def sample_task(n=6):
    amplitude, phase = torch.rand(()) * 4 + 1, torch.rand(()) * 3
    x = torch.rand(2 * n, 1) * 10 - 5
    y = amplitude * torch.sin(x + phase)
    return x[:n], y[:n], x[n:], y[n:]


def adapt(net, x, y, inner_lr=0.01, inner_steps=2):
    params = dict(net.named_parameters())
    for _ in range(inner_steps):
        loss = F.mse_loss(functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(loss, params.values(), create_graph=True)
        params = {name: p - inner_lr * g for (name, p), g in zip(params.items(), grads)}
    return params


def average_gradients(net, size):
    for p in net.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= size


job = relight.init()
torch.manual_seed(6)
net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3)
training = relight.Training(model=net, optimizer=meta_opt)
for step in training.steps(until=14):
    with step:
        meta_opt.zero_grad()
        for _ in range(3):
            xs, ys, xq, yq = sample_task()
            F.mse_loss(functional_call(net, adapt(net, xs, ys), (xq,)), yq).div(3).backward()
        average_gradients(net, job.world_size)
        meta_opt.step()
finish(job, net=net, meta_opt=meta_opt)
