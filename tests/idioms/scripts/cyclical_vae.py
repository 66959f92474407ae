"""A VAE with a cyclic weight of the KL from an array, free bits, an n_iter counter, a logger class like wandb's with a
current run as a class attribute, a summary that keeps the minimum, a config that is nested and dotted."""

# ranks: 2
import time
import weakref

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class DictConfig:
    def __init__(self, content):
        object.__setattr__(
            self, "_content", {k: DictConfig(v) if isinstance(v, dict) else v for k, v in content.items()}
        )

    def __getattr__(self, key):
        try:
            return object.__getattribute__(self, "_content")[key]
        except KeyError:
            raise AttributeError(key) from None

    def __setattr__(self, key, value):
        self._content[key] = value

    def update_dotted(self, dotlist):
        for item in dotlist:
            key, value = item.split("=")
            *path, last = key.split(".")
            node = self
            for part in path:
                node = getattr(node, part)
            setattr(node, last, type(getattr(node, last))(value))


class Run:
    current = None

    def __init__(self, config):
        self.config, self.history, self.summary, self._step, self._start = config, [], {}, 0, time.time()
        Run.current = self
        self.watched = weakref.WeakSet()

    def watch(self, model):
        self.watched.add(model)

    def log(self, data, step=None, commit=True):
        self.history.append({"_step": self._step if step is None else step, **data})
        for key, value in data.items():
            self.summary[key] = value
            self.summary[f"{key}.min"] = min(value, self.summary.get(f"{key}.min", float("inf")))
        if commit:
            self._step += 1


def log(data, **kwargs):
    Run.current.log(data, **kwargs)


def frange_cycle_linear(n_iter, start=0.0, stop=1.0, n_cycle=2, ratio=0.5):
    L = np.ones(n_iter) * stop
    period = n_iter / n_cycle
    step = (stop - start) / (period * ratio)
    for c in range(n_cycle):
        v, i = start, 0
        while v <= stop and (int(i + c * period) < n_iter):
            L[int(i + c * period)] = v
            v += step
            i += 1
    return L


class VAE(nn.Module):
    def __init__(self, dim=20, hidden=24, z=4):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(dim, hidden), nn.Linear(hidden, z), nn.Linear(hidden, z)
        self.fc3, self.fc4 = nn.Linear(z, hidden), nn.Linear(hidden, dim)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        h1 = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        h3 = F.relu(self.fc3(self.reparameterize(mu, logvar)))
        return torch.sigmoid(self.fc4(h3)), mu, logvar


def loss_function(recon_x, x, mu, logvar, beta, free_bits):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum")
    KLD = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + beta * KLD.clamp(min=free_bits).sum(), KLD.sum().item()


def main():
    cfg = DictConfig({"optim": {"lr": 0.01, "clip": 5.0}, "train": {"epochs": 5, "batch": 8}, "free_bits": 0.1})
    cfg.update_dotted(["optim.lr=0.005", "train.epochs=4"])
    job = relight.init()
    torch.manual_seed(1)
    data = TensorDataset(torch.rand(96, 20))
    loader = DataLoader(data, cfg.train.batch, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.optim.lr)
    run = Run(cfg)
    run.watch(model)
    schedule = frange_cycle_linear(cfg.train.epochs * len(loader))
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    n_iter, train_loss, collapsed = 0, 0, 0
    for step in training.steps(until=cfg.train.epochs * len(loader)):
        with step as (x,):
            beta = schedule[n_iter]
            optimizer.zero_grad()
            recon, mu, logvar = model(x)
            loss, kl = loss_function(recon, x, mu, logvar, beta, cfg.free_bits)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip)
            train_loss += loss.item()
            collapsed = collapsed + 1 if kl < 1.0 else 0
            if collapsed > 3:
                cfg.free_bits = min(0.5, cfg.free_bits * 1.5)
                collapsed = 0
            log({"loss": loss.item() / len(x), "kl": kl, "beta": float(beta)})
            n_iter += 1
            optimizer.step()
    finish(
        job, model=model, optimizer=optimizer, n_iter=n_iter, loss=train_loss, summary=run.summary, history=run.history,
        free_bits=cfg.free_bits, logged=run._step,
    )  # fmt: skip


if __name__ == "__main__":
    main()
