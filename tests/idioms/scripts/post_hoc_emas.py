"""Several averages of the weights with exponents of their own (EDM2), kept in a list and copied aside now and then."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def std_to_exp(std):
    std = np.float64(std)
    tmp = std.flatten() ** -2
    exp = [np.roots([1, 7, 16 - t, 12 - t]).real.max() for t in tmp]
    return np.float64(exp).reshape(std.shape)


def power_function_beta(std, t_next, t_delta):
    return (1 - t_delta / t_next) ** (std_to_exp(std) + 1)


class PowerFunctionEMA:
    def __init__(self, net, stds=(0.050, 0.100)):
        self.net, self.stds = net, stds
        self.emas = [copy.deepcopy(net) for _ in stds]

    @torch.no_grad()
    def update(self, cur_nimg, batch_size):
        for std, ema in zip(self.stds, self.emas):
            beta = power_function_beta(std=std, t_next=cur_nimg, t_delta=batch_size)
            for p_net, p_ema in zip(self.net.parameters(), ema.parameters()):
                p_ema.lerp_(p_net, float(1 - beta))
        for ema in self.emas:
            for b_net, b_ema in zip(self.net.buffers(), ema.buffers()):
                b_ema.copy_(b_net)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("freqs", 2 * np.pi * torch.randn(4))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
        self.logvar = nn.Linear(4, 1)

    def forward(self, x, sigma):
        emb = (sigma.log() / 4 * self.freqs).cos() * np.sqrt(2)
        return self.net(torch.cat([x / (1 + sigma**2).sqrt(), emb], 1)), self.logvar(emb)


job = relight.init()
torch.manual_seed(39)
net = Denoiser()
ema = PowerFunctionEMA(net)
ddp = DDP(net)
optimizer = torch.optim.Adam(net.parameters(), betas=(0.9, 0.99))
training = relight.Training(
    model={"net": ddp, **{f"ema{i}": e for i, e in enumerate(ema.emas)}},
    optimizer=optimizer,
    data=lambda n: torch.randn(8, 4),
)
cur_nimg, snapshots = 0, []
for step in training.steps(until=16):
    with step as x:
        optimizer.zero_grad(set_to_none=True)
        sigma = (torch.randn(len(x), 1) * 1.2 - 0.4).exp()
        denoised, logvar = ddp(x + torch.randn_like(x) * sigma, sigma)
        ((denoised - x).square() / logvar.exp() + logvar).mean().backward()
        lr = 0.01 / np.sqrt(max(cur_nimg / 64, 1))
        for g in optimizer.param_groups:
            g["lr"] = lr
        for p in net.parameters():
            if p.grad is not None:
                torch.nan_to_num(p.grad, nan=0, posinf=0, neginf=0, out=p.grad)
        optimizer.step()
        cur_nimg += len(x)
        ema.update(cur_nimg=cur_nimg, batch_size=len(x))
        if cur_nimg % 48 == 0:
            snapshots.append([p.detach().clone() for p in ema.emas[0].parameters()])
finish(job, net=ddp, emas=ema.emas, optimizer=optimizer, cur_nimg=cur_nimg, snapshots=snapshots)
