"""A GAN with spectral norm in D (power iteration moves buffers in every forward in training), hinge loss, two schedulers.

D runs several times a step, also after its own write, so its buffers change after the first write.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import spectral_norm
from torch.optim.lr_scheduler import ExponentialLR

import relight
from tests.idioms.digest import finish

Z = 4


def build():
    G = nn.Sequential(nn.Linear(Z, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 9), nn.Tanh())
    D = nn.Sequential(
        spectral_norm(nn.Linear(9, 16)), nn.LeakyReLU(0.1), spectral_norm(nn.Linear(16, 16)), nn.LeakyReLU(0.1),
        spectral_norm(nn.Linear(16, 1)),
    )  # fmt: skip
    return G, D


def train(job, n_steps=16):
    torch.manual_seed(31)
    generator, discriminator = build()
    generator, discriminator = DDP(generator), DDP(discriminator, broadcast_buffers=False)
    optim_disc = torch.optim.Adam(
        filter(lambda p: p.requires_grad, discriminator.parameters()), lr=2e-3, betas=(0.0, 0.9)
    )
    optim_gen = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
    scheduler_d = ExponentialLR(optim_disc, gamma=0.97)
    scheduler_g = ExponentialLR(optim_gen, gamma=0.97)
    training = relight.Training(
        model={"generator": generator, "discriminator": discriminator},
        optimizer={"disc": optim_disc, "gen": optim_gen},
        data=lambda _: torch.randn(6, 9).tanh(),
        scheduler_d=scheduler_d,
        scheduler_g=scheduler_g,
    )
    for step in training.steps(until=n_steps):
        with step as data:
            optim_disc.zero_grad()
            optim_gen.zero_grad()
            fake = generator(torch.randn(6, Z)).detach()
            disc_loss = nn.ReLU()(1.0 - discriminator(data)).mean() + nn.ReLU()(1.0 + discriminator(fake)).mean()
            disc_loss.backward()
            optim_disc.step()

            optim_disc.zero_grad()
            optim_gen.zero_grad()
            gen_loss = -discriminator(generator(torch.randn(6, Z))).mean()
            gen_loss.backward()
            optim_gen.step()
            scheduler_d.step()
            scheduler_g.step()
    return dict(g=generator, d=discriminator, od=optim_disc, og=optim_gen, sd=scheduler_d, sg=scheduler_g)


job = relight.init()
finish(job, **train(job))
