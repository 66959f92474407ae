"""The probability of augmentation follows the discriminator's signs, collected over steps."""

# ranks: 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AdaptiveAugment:
    def __init__(self, target, length, every):
        self.target, self.length, self.every = target, length, every
        self.ada_update = 0
        self.ada_aug_buf = torch.tensor([0.0, 0.0])
        self.r_t_stat = 0
        self.ada_aug_p = 0

    @torch.no_grad()
    def tune(self, real_pred):
        self.ada_aug_buf += torch.tensor((torch.sign(real_pred).sum().item(), real_pred.shape[0]))
        self.ada_update += 1
        if self.ada_update % self.every == 0:
            dist.all_reduce(self.ada_aug_buf)
            pred_signs, n_pred = self.ada_aug_buf.tolist()
            self.r_t_stat = pred_signs / n_pred
            sign = 1 if self.r_t_stat > self.target else -1
            self.ada_aug_p += sign * n_pred / self.length
            self.ada_aug_p = min(1, max(0, self.ada_aug_p))
            self.ada_aug_buf.mul_(0)
            self.ada_update = 0
        return self.ada_aug_p


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def main():
    job = relight.init()
    torch.manual_seed(71)
    generator = DDP(nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 4)))
    discriminator = DDP(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    g_ema = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 4)).requires_grad_(False)
    g_ema.load_state_dict(generator.module.state_dict())
    g_optim = torch.optim.Adam(generator.parameters(), 0.01, betas=(0.0, 0.99))
    d_optim = torch.optim.Adam(discriminator.parameters(), 0.01, betas=(0.0, 0.99))
    ada = AdaptiveAugment(0.1, 60, 3)
    training = relight.Training(
        model={"g": generator, "d": discriminator},
        optimizer={"g": g_optim, "d": d_optim},
        ema=g_ema,
        data=lambda n: torch.randn(6, 4),
    )
    ada_p = 0.0
    for step in training.steps(until=15):
        with step as real:
            requires_grad(generator, False)
            requires_grad(discriminator, True)
            fake = generator(torch.randn(6, 3))
            real_aug = torch.where(torch.rand(6, 1) < ada_p, -real, real)
            real_pred, fake_pred = discriminator(real_aug), discriminator(fake)
            d_loss = F.softplus(-real_pred).mean() + F.softplus(fake_pred).mean()
            discriminator.zero_grad()
            d_loss.backward()
            d_optim.step()
            ada_p = ada.tune(real_pred)
            requires_grad(generator, True)
            requires_grad(discriminator, False)
            g_loss = F.softplus(-discriminator(generator(torch.randn(6, 3)))).mean()
            generator.zero_grad()
            g_loss.backward()
            g_optim.step()
            for a, b in zip(g_ema.parameters(), generator.module.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
    finish(job, g=generator, d=discriminator, go=g_optim, do=d_optim, ema=g_ema, p=ada_p, buf=ada.ada_aug_buf)


if __name__ == "__main__":
    main()
