"""A Wasserstein GAN in the usual single loop: the critic in every step, the generator in every fifth one only."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

n_critic, clip_value, latent_dim = 5, 0.1, 4

job = relight.init()
torch.manual_seed(32)
generator = DDP(nn.Sequential(nn.Linear(latent_dim, 16), nn.ReLU(), nn.Linear(16, 6)))
discriminator = DDP(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
optimizer_G = torch.optim.RMSprop(generator.parameters(), lr=5e-3)
optimizer_D = torch.optim.RMSprop(discriminator.parameters(), lr=5e-3)
training = relight.Training(
    model={"G": generator, "D": discriminator},
    optimizer={"G": optimizer_G, "D": optimizer_D},
    data=lambda n: torch.randn(6, 6) + 1,
)
batches_done = 0
for step in training.steps(until=21):
    with step as real_imgs:
        optimizer_D.zero_grad()
        z = torch.randn(real_imgs.shape[0], latent_dim)
        fake_imgs = generator(z).detach()
        loss_D = -torch.mean(discriminator(real_imgs)) + torch.mean(discriminator(fake_imgs))
        loss_D.backward()
        optimizer_D.step()
        for p in discriminator.parameters():
            p.data.clamp_(-clip_value, clip_value)
        if step.number % n_critic == 0:
            optimizer_G.zero_grad()
            gen_imgs = generator(z)
            loss_G = -torch.mean(discriminator.module(gen_imgs))
            loss_G.backward()
            optimizer_G.step()
        batches_done += 1
finish(job, G=generator, D=discriminator, optG=optimizer_G, optD=optimizer_D, batches_done=batches_done)
