"""A GAN that trains D in even steps and G in odd ones: the generator's DDP is not used in the job's first step.

One write a step, but of another optimizer each time; each wrapper has its own history of backward passes.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(5)
    real_data = torch.randn(300, 8) @ torch.randn(8, 8)
    g = DDP(nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 8)))
    d = DDP(nn.Sequential(nn.Linear(8, 20), nn.LeakyReLU(), nn.Linear(20, 20), nn.LeakyReLU(), nn.Linear(20, 1)))
    g_optimizer = torch.optim.Adam(g.parameters(), 1e-3)
    d_optimizer = torch.optim.Adam(d.parameters(), 1e-3)
    training = relight.Training(model={"g": g, "d": d}, optimizer={"g": g_optimizer, "d": d_optimizer})

    for step in training.steps(until=20):
        with step:
            z = torch.randn(8, 3)
            if step.number % 2 == 0:
                real = real_data[torch.randint(0, 300, (8,))]
                with torch.no_grad():
                    fake = g(z)
                out = d(torch.cat([real, fake]))
                loss = F.binary_cross_entropy_with_logits(out, torch.cat([torch.ones(8, 1), torch.zeros(8, 1)]))
                d_optimizer.zero_grad()
                loss.backward()
                d_optimizer.step()
            else:
                loss = -F.logsigmoid(d.module(g(z))).mean()
                g_optimizer.zero_grad()
                loss.backward()
                g_optimizer.step()
    finish(job, g=g, d=d, g_optimizer=g_optimizer, d_optimizer=d_optimizer)


if __name__ == "__main__":
    main()
