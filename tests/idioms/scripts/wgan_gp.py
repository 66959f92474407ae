"""WGAN-GP: several critic updates with a gradient penalty (a graph of second order), then one of the generator.

Four writes in a step, of two optimizers; torch.autograd.grad(create_graph=True) through DDP's module.
"""

import torch
from torch import autograd, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

N_CRITIC, LAMBDA = 3, 10.0


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(real.size(0), 1)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    out = critic(interpolates)
    gradients = autograd.grad(out, interpolates, torch.ones_like(out), create_graph=True, retain_graph=True)[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


class WGAN:
    def __init__(self):
        self.job = relight.init()
        torch.manual_seed(21)
        self.G = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)))
        self.C = DDP(nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 1)))
        self.opt_G = torch.optim.RMSprop(self.G.parameters(), lr=1e-3)
        self.opt_C = torch.optim.RMSprop(self.C.parameters(), lr=1e-3, momentum=0.1)

    def critic_step(self, real):
        fake = self.G(torch.randn(len(real), 4)).detach()
        scores = self.C(torch.cat([real, fake]))
        loss = scores[len(real) :].mean() - scores[: len(real)].mean()
        loss = loss + LAMBDA * gradient_penalty(self.C.module, real, fake)
        self.opt_C.zero_grad()
        loss.backward()
        self.opt_C.step()
        return loss.item()

    def generator_step(self, n):
        for p in self.C.parameters():
            p.requires_grad = False
        loss = -self.C.module(self.G(torch.randn(n, 4))).mean()
        self.opt_G.zero_grad()
        loss.backward()
        self.opt_G.step()
        for p in self.C.parameters():
            p.requires_grad = True

    def train(self, iterations=12):
        training = relight.Training(
            model={"G": self.G, "C": self.C},
            optimizer={"G": self.opt_G, "C": self.opt_C},
            data=lambda _: torch.randn(6, 6) * 2 + 1,
            accumulate=N_CRITIC,
        )
        for step in training.steps(until=iterations):
            with step as reals:
                for real in reals:
                    self.critic_step(real)
                self.generator_step(6)
        finish(self.job, G=self.G, C=self.C, opt_G=self.opt_G, opt_C=self.opt_C)


WGAN().train()
