"""A style-based GAN: lazy regularization every few steps, a running mean of path lengths, an average made by hand."""

# ranks: 2
import math
import random

import torch
from torch import autograd, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def accumulate(model1, model2, decay=0.999):
    par1 = dict(model1.named_parameters())
    par2 = dict(model2.named_parameters())
    for k in par1.keys():
        par1[k].data.mul_(decay).add_(par2[k].data, alpha=1 - decay)


def g_path_regularize(fake, latents, mean_path_length, decay=0.01):
    noise = torch.randn_like(fake) / math.sqrt(fake.shape[1])
    (grad,) = autograd.grad(outputs=(fake * noise).sum(), inputs=latents, create_graph=True)
    path_lengths = torch.sqrt(grad.pow(2).sum(1))
    path_mean = mean_path_length + decay * (path_lengths.mean() - mean_path_length)
    path_penalty = (path_lengths - path_mean).pow(2).mean()
    return path_penalty, path_mean.detach(), path_lengths


def reduce_sum(tensor):
    tensor = tensor.clone()
    torch.distributed.all_reduce(tensor)
    return tensor


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.style = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2))
        self.synthesis = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6))

    def forward(self, noises, return_latents=False):
        latent = sum(self.style(z) for z in noises) / len(noises)
        image = self.synthesis(latent)
        return (image, latent) if return_latents else (image, None)


def mixing_noise(batch, prob):
    if random.random() < prob:
        return list(torch.randn(2, batch, 4).unbind(0))
    return [torch.randn(batch, 4)]


def train(args):
    job = relight.init()
    torch.manual_seed(2)
    generator, g_ema = Generator(), Generator()
    discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    g_ema.eval()
    accumulate(g_ema, generator, 0)
    generator = DDP(generator, broadcast_buffers=False)
    discriminator = DDP(discriminator, broadcast_buffers=False)
    ratio = args["g_reg_every"] / (args["g_reg_every"] + 1)
    g_optim = torch.optim.Adam(generator.parameters(), lr=0.01 * ratio, betas=(0.0, 0.99**ratio))
    d_optim = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.0, 0.99))
    training = relight.Training(
        model={"g": generator, "d": discriminator, "g_ema": g_ema},
        optimizer={"g": g_optim, "d": d_optim},
        data=lambda n: torch.randn(6, 6) + 1,
    )
    mean_path_length, mean_path_length_avg, loss_dict = 0, 0, {}
    r1_loss = torch.tensor(0.0)
    accum = 0.5 ** (32 / (10 * 1000))
    for step in training.steps(until=18):
        i = step.number
        with step as real:
            requires_grad(generator, False)
            requires_grad(discriminator, True)
            fake, _ = generator(mixing_noise(6, 0.9))
            fake_pred, real_pred = discriminator(fake), discriminator(real)
            d_loss = F.softplus(-real_pred).mean() + F.softplus(fake_pred).mean()
            loss_dict["d"] = d_loss
            discriminator.zero_grad()
            d_loss.backward()
            d_optim.step()
            if i % args["d_reg_every"] == 0:
                real.requires_grad = True
                real_pred = discriminator(real)
                (grad_real,) = autograd.grad(outputs=real_pred.sum(), inputs=real, create_graph=True)
                r1_loss = grad_real.pow(2).sum(1).mean()
                discriminator.zero_grad()
                (5 * r1_loss * args["d_reg_every"] + 0 * real_pred[0]).sum().backward()
                d_optim.step()
            loss_dict["r1"] = r1_loss
            requires_grad(generator, True)
            requires_grad(discriminator, False)
            fake, _ = generator(mixing_noise(6, 0.9))
            g_loss = F.softplus(-discriminator(fake)).mean()
            generator.zero_grad()
            g_loss.backward()
            g_optim.step()
            if i % args["g_reg_every"] == 0:
                fake, latents = generator(mixing_noise(3, 0.9), return_latents=True)
                path_loss, mean_path_length, path_lengths = g_path_regularize(fake, latents, mean_path_length)
                generator.zero_grad()
                (2 * args["g_reg_every"] * path_loss + 0 * fake[0, 0]).backward()
                g_optim.step()
                mean_path_length_avg = reduce_sum(mean_path_length).item() / 2
            accumulate(g_ema, generator.module, accum)
    finish(
        job,
        g=generator,
        d=discriminator,
        g_ema=g_ema,
        g_optim=g_optim,
        d_optim=d_optim,
        mean_path_length=mean_path_length,
        average=mean_path_length_avg,
    )


if __name__ == "__main__":
    train({"d_reg_every": 4, "g_reg_every": 3})
