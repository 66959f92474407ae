"""An energy-based model whose negative samples come from Langevin chains that are kept in a list and continued."""

# ranks: 2
import random

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class EnergyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 24), Swish(), nn.Linear(24, 24), Swish(), nn.Linear(24, 1))

    def forward(self, x):
        return self.layers(x).squeeze(-1)


class Sampler:
    def __init__(self, model, shape, sample_size, max_len=64):
        self.model, self.shape, self.sample_size, self.max_len = model, shape, sample_size, max_len
        self.examples = [torch.rand((1,) + shape) * 2 - 1 for _ in range(sample_size)]

    def sample_new_exmps(self, steps=10, step_size=0.1):
        n_new = np.random.binomial(self.sample_size, 0.2)
        rand_imgs = torch.rand((n_new,) + self.shape) * 2 - 1
        old_imgs = torch.cat(random.choices(self.examples, k=self.sample_size - n_new), dim=0)
        inp_imgs = torch.cat([rand_imgs, old_imgs], dim=0).detach()
        inp_imgs = Sampler.generate_samples(self.model, inp_imgs, steps=steps, step_size=step_size)
        self.examples = list(inp_imgs.chunk(self.sample_size, dim=0)) + self.examples
        self.examples = self.examples[: self.max_len]
        return inp_imgs

    @staticmethod
    def generate_samples(model, inp_imgs, steps=10, step_size=0.1):
        is_training = model.training
        model.eval()
        for p in model.parameters():
            p.requires_grad = False
        inp_imgs.requires_grad = True
        had_gradients_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        noise = torch.randn(inp_imgs.shape)
        for _ in range(steps):
            noise.normal_(0, 0.005)
            inp_imgs.data.add_(noise.data)
            inp_imgs.data.clamp_(min=-1.0, max=1.0)
            out = -model(inp_imgs)
            out.sum().backward()
            inp_imgs.grad.data.clamp_(-0.03, 0.03)
            inp_imgs.data.add_(-step_size * inp_imgs.grad.data)
            inp_imgs.grad.detach_()
            inp_imgs.grad.zero_()
            inp_imgs.data.clamp_(min=-1.0, max=1.0)
        for p in model.parameters():
            p.requires_grad = True
        model.train(is_training)
        torch.set_grad_enabled(had_gradients_enabled)
        return inp_imgs


class DeepEnergyModel:
    def __init__(self, alpha=0.1):
        self.cnn = DDP(EnergyNet())
        self.sampler = Sampler(self.cnn.module, (6,), 8)
        self.alpha = alpha
        self.optimizer = torch.optim.Adam(self.cnn.parameters(), lr=1e-3, betas=(0.0, 0.999))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.97)

    def training_step(self, real):
        real.add_(torch.randn_like(real) * 0.005).clamp_(min=-1.0, max=1.0)
        fake = self.sampler.sample_new_exmps(steps=6, step_size=1)
        real_out, fake_out = self.cnn(torch.cat([real, fake], dim=0)).chunk(2, dim=0)
        return self.alpha * (real_out**2 + fake_out**2).mean() + fake_out.mean() - real_out.mean()


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(42)
    random.seed(job.rank)
    lit = DeepEnergyModel()
    training = relight.Training(
        model=lit.cnn, optimizer=lit.optimizer, scheduler=lit.scheduler, data=lambda n: torch.tanh(torch.randn(8, 6))
    )
    for step in training.steps(until=16):
        with step as batch:
            loss = lit.training_step(batch)
            lit.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(lit.cnn.parameters(), 0.1)
            lit.optimizer.step()
            if step.number % 4 == 3:
                lit.scheduler.step()
    finish(job, cnn=lit.cnn, opt=lit.optimizer, sched=lit.scheduler, examples=lit.sampler.examples)
