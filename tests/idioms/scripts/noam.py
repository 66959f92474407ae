"""The Noam wrapper of the Annotated Transformer: a plain class around Adam that counts its own steps and writes the rate."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class NoamOpt:
    "Optim wrapper that implements rate."

    def __init__(self, model_size, factor, warmup, optimizer):
        self.optimizer = optimizer
        self._step = 0
        self.warmup = warmup
        self.factor = factor
        self.model_size = model_size
        self._rate = 0

    def step(self):
        self._step += 1
        rate = self.rate()
        for p in self.optimizer.param_groups:
            p["lr"] = rate
        self._rate = rate
        self.optimizer.step()

    def rate(self, step=None):
        if step is None:
            step = self._step
        return self.factor * (self.model_size ** (-0.5) * min(step ** (-0.5), step * self.warmup ** (-1.5)))


def run_epoch():
    job = relight.init()
    torch.manual_seed(46)
    model = DDP(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True))
    optimizer = NoamOpt(8, 0.5, 6, torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9))
    training = relight.Training(model=model, optimizer=optimizer.optimizer, data=lambda n: torch.randn(4, 5, 8))
    for step in training.steps(until=16):
        with step as src:
            loss = (model(src) - src.roll(1, 1)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.optimizer.zero_grad()
    finish(job, model=model, optimizer=optimizer.optimizer, step=optimizer._step, rate=optimizer._rate)


run_epoch()
