"""BEGAN: the balance k is a number moved after both updates, the rate halves when the measure of the last steps stands still
(a deque of maxlen), fixed noise for samples, everything attributes of a Trainer that has no forward."""

# ranks: 2
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Trainer:
    def __init__(self, config):
        self.config = config
        self.job = relight.init()
        torch.manual_seed(3)
        self.build_model()
        self.z_fixed = torch.FloatTensor(4, 8).uniform_(-1, 1)
        self.g_optimizer = optim.Adam(self.G.parameters(), lr=config["lr"], betas=(0.5, 0.999))
        self.d_optimizer = optim.Adam(self.D.parameters(), lr=config["lr"], betas=(0.5, 0.999))
        self.k_t, self.lr, self.gamma, self.lambda_k = 0, config["lr"], 0.5, 0.05
        self.measure_history = deque([0] * 4, 4)
        self.prev_measure = 1

    def build_model(self):
        self.G = DDP(nn.Sequential(nn.Linear(8, 16), nn.ELU(), nn.Linear(16, 6)))
        self.D = DDP(nn.Sequential(nn.Linear(6, 4), nn.ELU(), nn.Linear(4, 6)), broadcast_buffers=False)

    def train(self):
        training = relight.Training(
            model={"G": self.G, "D": self.D},
            optimizer={"g": self.g_optimizer, "d": self.d_optimizer},
            data=lambda n: torch.rand(8, 6),
        )
        pbar = training.steps(until=20)
        for step in pbar:
            with step as x:
                self.train_step(x)
            if step.number % 4 == 3:
                cur_measure = np.mean(self.measure_history)
                if cur_measure > self.prev_measure * 0.99:
                    self.lr *= 0.5
                    for optimizer in (self.g_optimizer, self.d_optimizer):
                        for group in optimizer.param_groups:
                            group["lr"] = self.lr
                self.prev_measure = cur_measure
                samples = self.generate(self.z_fixed)
                print(f"[{step.number}] measure {cur_measure:.4f} k_t {self.k_t:.4f} {samples.mean():.3f}")

    def train_step(self, x):
        z_D, z_G = torch.empty(8, 8).uniform_(-1, 1), torch.empty(8, 8).uniform_(-1, 1)
        self.d_optimizer.zero_grad()
        with torch.no_grad():
            fake = self.G.module(z_D)
        d_loss_real = (self.D(x) - x).abs().mean()
        d_loss_fake = (self.D.module(fake) - fake).abs().mean()
        (d_loss_real - self.k_t * d_loss_fake).backward()
        self.d_optimizer.step()
        self.g_optimizer.zero_grad()
        fake = self.G(z_G)
        g_loss = (self.D.module(fake) - fake).abs().mean()
        g_loss.backward()
        self.g_optimizer.step()
        balance = torch.stack([self.gamma * d_loss_real.detach() - g_loss.detach(), d_loss_real.detach()])
        dist.all_reduce(balance)
        balance = (balance / dist.get_world_size()).tolist()
        self.k_t = max(min(1, self.k_t + self.lambda_k * balance[0]), 0)
        self.measure = balance[1] + abs(balance[0])
        self.measure_history.append(self.measure)

    def generate(self, z):
        self.G.eval()
        out = self.G.module(z).detach()
        self.G.train()
        return out


if __name__ == "__main__":
    trainer = Trainer({"lr": 0.01})
    trainer.train()
    finish(
        trainer.job, G=trainer.G, D=trainer.D, g=trainer.g_optimizer, d=trainer.d_optimizer, k=trainer.k_t, lr=trainer.lr,
        history=trainer.measure_history, measure=trainer.prev_measure,
    )  # fmt: skip
