"""A GAN that updates G first and then D, as many repositories do. D's gradients come from two forward passes in one.

Two writes in a step; the first is another optimizer's than in DCGAN.
"""

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import relight
from tests.idioms.digest import finish

parser = argparse.ArgumentParser()
parser.add_argument("--n_steps", type=int, default=16, help="number of steps of training")
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--b1", type=float, default=0.5)
parser.add_argument("--latent_dim", type=int, default=5)
opt = parser.parse_args()

job = relight.init()
torch.manual_seed(0)

generator = DistributedDataParallel(
    nn.Sequential(
        nn.Linear(opt.latent_dim, 16), nn.BatchNorm1d(16, 0.8), nn.LeakyReLU(0.2), nn.Linear(16, 10), nn.Tanh()
    )
)
discriminator = DistributedDataParallel(
    nn.Sequential(nn.Linear(10, 16), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(16, 1))
)
adversarial_loss = nn.BCEWithLogitsLoss()
optimizer_G = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(opt.b1, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=opt.lr, betas=(opt.b1, 0.999))


def sample(i):
    return torch.randn(opt.batch_size, 10).cumsum(1).tanh()


training = relight.Training(
    model=dict(generator=generator, discriminator=discriminator),
    optimizer=dict(g=optimizer_G, d=optimizer_D),
    data=sample,
)
for step in training.steps(until=opt.n_steps):
    with step as real_imgs:
        valid = torch.ones(opt.batch_size, 1)
        fake = torch.zeros(opt.batch_size, 1)
        # -- Train Generator
        optimizer_G.zero_grad()
        z = torch.randn(opt.batch_size, opt.latent_dim)
        gen_imgs = generator(z)
        g_loss = adversarial_loss(discriminator(gen_imgs), valid)
        g_loss.backward()
        optimizer_G.step()
        # -- Train Discriminator
        optimizer_D.zero_grad()
        both = discriminator(torch.cat([real_imgs, gen_imgs.detach()]))
        d_loss = (adversarial_loss(both[: opt.batch_size], valid) + adversarial_loss(both[opt.batch_size :], fake)) / 2
        d_loss.backward()
        optimizer_D.step()
    if step.committed and job.rank == 0 and step.number % 5 == 0:
        print("[Step %d/%d] [D loss: %f] [G loss: %f]" % (step.number, opt.n_steps, d_loss.item(), g_loss.item()))
finish(job, generator=generator, discriminator=discriminator, g=optimizer_G, d=optimizer_D)
