"""An autoencoder with a discriminator that starts after some steps, and an adversarial weight from the last layer's gradients.

The discriminator's DDP and optimizer are not used in the first steps; from then on there are two writes in a step.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

DISC_START = 6


def adopt_weight(weight, global_step, threshold=0, value=0.0):
    return value if global_step < threshold else weight


def adaptive_weight(nll_loss, g_loss, last_layer):
    nll_grads = torch.autograd.grad(nll_loss, last_layer, retain_graph=True)[0]
    g_grads = torch.autograd.grad(g_loss, last_layer, retain_graph=True)[0]
    return torch.clamp(nll_grads.norm() / (g_grads.norm() + 1e-4), 0.0, 1e2).detach()


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(12, 16), nn.SiLU(), nn.Linear(16, 4))
        self.dec = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 12))

    def forward(self, x):
        return self.dec(self.enc(x))


def main():
    job = relight.init()
    torch.manual_seed(23)
    ae = DDP(AutoEncoder())
    disc = DDP(nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    opt_ae = torch.optim.Adam(ae.parameters(), lr=4.5e-3, betas=(0.5, 0.9))
    opt_disc = torch.optim.Adam(disc.parameters(), lr=4.5e-3, betas=(0.5, 0.9))
    training = relight.Training(
        model={"ae": ae, "disc": disc},
        optimizer={"ae": opt_ae, "disc": opt_disc},
        data=lambda i: torch.randn(6, 3).repeat(1, 4) + 0.1 * torch.randn(6, 12),
    )
    for step in training.steps(until=18):
        with step as x:
            global_step = step.number
            xrec = ae(x)
            nll_loss = F.l1_loss(xrec, x)
            loss = nll_loss
            if global_step >= DISC_START:
                g_loss = -disc.module(xrec).mean()
                weight = adaptive_weight(nll_loss, g_loss, ae.module.dec[-1].weight)
                loss = loss + weight * adopt_weight(0.8, global_step, DISC_START) * g_loss
            opt_ae.zero_grad()
            loss.backward()
            opt_ae.step()
            if global_step >= DISC_START:
                opt_disc.zero_grad()
                logits_real, logits_fake = disc(torch.cat([x, xrec.detach()])).chunk(2)
                d_loss = 0.5 * (F.relu(1.0 - logits_real).mean() + F.relu(1.0 + logits_fake).mean())
                d_loss.backward()
                opt_disc.step()
    finish(job, ae=ae, disc=disc, opt_ae=opt_ae, opt_disc=opt_disc)


if __name__ == "__main__":
    main()
