"""A categorical autoencoder: a temperature attribute on the module that the loop multiplies, a counter on the module that
forward increments, and hard samples later on."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class GumbelVAE(nn.Module):
    def __init__(self, codes=6):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(9, codes * 3), nn.Linear(codes * 3, 9)
        self.temperature = 1.0
        self.n_forward = 0

    def forward(self, x):
        if self.training:
            self.n_forward += 1
        logits = self.encoder(x).view(len(x), -1, 3)
        z = F.gumbel_softmax(logits, tau=self.temperature, hard=self.n_forward > 10)
        kl = (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        return self.decoder(z.flatten(1)), kl


class Solver:
    anneal_rate = 0.95

    def __init__(self):
        self.job = relight.init()
        torch.manual_seed(39)
        self.net = DDP(GumbelVAE())
        self.opt = torch.optim.Adam(self.net.parameters(), lr=5e-3)

    def solve(self):
        training = relight.Training(model=self.net, optimizer=self.opt, data=lambda n: torch.randn(6, 9))
        for step in training.steps(until=18):
            with step as x:
                recon, kl = self.net(x)
                loss = F.mse_loss(recon, x) + 0.1 * kl
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.net.module.temperature = max(0.3, self.net.module.temperature * self.anneal_rate)
        vae = self.net.module
        finish(self.job, net=self.net, opt=self.opt, temperature=vae.temperature, n_forward=vae.n_forward)


if __name__ == "__main__":
    Solver().solve()
