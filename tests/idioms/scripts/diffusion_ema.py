"""DDPM with a class that keeps an exponential average as a deep copy of the model, moved by hand after the write.

The average is no torch object: a class with its own step counter and warm-up, as in many repositories.
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class EMA:
    def __init__(self, model, beta=0.9):
        self.beta = beta
        self.step = 0
        self.ema_model = copy.deepcopy(model).eval().requires_grad_(False)

    def update_average(self, old, new):
        return new if old is None else old * self.beta + (1 - self.beta) * new

    def step_ema(self, model, step_start_ema=4):
        if self.step < step_start_ema:
            self.ema_model.load_state_dict(model.state_dict())
        else:
            for current, ma in zip(model.parameters(), self.ema_model.parameters()):
                ma.data = self.update_average(ma.data, current.data)
        self.step += 1

    def state_dict(self):
        return {"model": self.ema_model.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        self.ema_model.load_state_dict(state["model"])
        self.step = state["step"]


class Diffusion:
    def __init__(self, noise_steps=50):
        self.noise_steps = noise_steps
        self.alpha_hat = torch.cumprod(1.0 - torch.linspace(1e-4, 0.05, noise_steps), 0)

    def noise_images(self, x, t):
        a = self.alpha_hat[t][:, None]
        eps = torch.randn_like(x)
        return a.sqrt() * x + (1 - a).sqrt() * eps, eps


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(50, 12)
        self.down, self.mid, self.up = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(32, 12)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x, t):
        h = F.silu(self.norm(self.down(x + self.time(t))))
        return self.up(torch.cat([h, F.silu(self.mid(h))], 1))


def train():
    job = relight.init()
    torch.manual_seed(4)
    model = DDP(UNet())
    diffusion = Diffusion()
    ema = EMA(model.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.randn(64, 12)
    training = relight.Training(
        model=model, optimizer=optimizer, ema=ema, data=lambda i: data[torch.randint(0, 64, (8,))]
    )
    for step in training.steps(until=18):
        with step as images:
            t = torch.randint(1, diffusion.noise_steps, (len(images),))
            x_t, noise = diffusion.noise_images(images, t)
            if torch.rand(()) < 0.1:
                t = torch.zeros_like(t)
            loss = F.mse_loss(noise, model(x_t, t))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.step_ema(model.module)
    finish(job, model=model, ema=ema, optimizer=optimizer)


train()
