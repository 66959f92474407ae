"""Diffusion with importance sampling of steps by gathered losses, a module-level logger, and averages in lists of tensors."""

# ranks: 2
import copy
import functools
from abc import ABC, abstractmethod
from collections import defaultdict

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

INITIAL_LOG = {"scale": 1.0}


class Logger:
    CURRENT = None

    def __init__(self):
        self.name2val, self.name2cnt, self.dumped = defaultdict(float), defaultdict(int), []

    def logkv_mean(self, key, val):
        oldval, cnt = self.name2val[key], self.name2cnt[key]
        self.name2val[key] = oldval * cnt / (cnt + 1) + val / (cnt + 1)
        self.name2cnt[key] = cnt + 1

    def dumpkvs(self):
        d = dict(self.name2val)
        self.dumped.append(d)
        self.name2val.clear()
        self.name2cnt.clear()
        return d


def get_current():
    if Logger.CURRENT is None:
        Logger.CURRENT = Logger()
    return Logger.CURRENT


def logkv_mean(key, val):
    get_current().logkv_mean(key, val)


class ScheduleSampler(ABC):
    @abstractmethod
    def weights(self): ...

    def sample(self, batch_size):
        w = self.weights()
        p = w / np.sum(w)
        indices_np = np.random.choice(len(p), size=(batch_size,), p=p)
        return torch.from_numpy(indices_np).long(), torch.from_numpy(1 / (len(p) * p[indices_np])).float()


class LossAwareSampler(ScheduleSampler):
    def update_with_local_losses(self, local_ts, local_losses):
        ts = [torch.zeros_like(local_ts) for _ in range(dist.get_world_size())]
        losses = [torch.zeros_like(local_losses) for _ in range(dist.get_world_size())]
        dist.all_gather(ts, local_ts)
        dist.all_gather(losses, local_losses)
        self.update_with_all_losses([x.item() for y in ts for x in y], [x.item() for y in losses for x in y])


class LossSecondMomentResampler(LossAwareSampler):
    def __init__(self, timesteps, history_per_term=3, uniform_prob=0.01):
        self.history_per_term, self.uniform_prob = history_per_term, uniform_prob
        self._loss_history = np.zeros([timesteps, history_per_term], dtype=np.float64)
        self._loss_counts = np.zeros([timesteps], dtype=int)

    def weights(self):
        if not self._warmed_up():
            return np.ones([len(self._loss_counts)], dtype=np.float64)
        weights = np.sqrt(np.mean(self._loss_history**2, axis=-1))
        weights /= np.sum(weights)
        weights *= 1 - self.uniform_prob
        weights += self.uniform_prob / len(weights)
        return weights

    def update_with_all_losses(self, ts, losses):
        for t, loss in zip(ts, losses):
            if self._loss_counts[t] == self.history_per_term:
                self._loss_history[t, :-1] = self._loss_history[t, 1:]
                self._loss_history[t, -1] = loss
            else:
                self._loss_history[t, self._loss_counts[t]] = loss
                self._loss_counts[t] += 1

    def _warmed_up(self):
        return (self._loss_counts == self.history_per_term).all()


def update_ema(target_params, source_params, rate=0.99):
    for targ, src in zip(target_params, source_params):
        targ.detach().mul_(rate).add_(src, alpha=1 - rate)


class TrainLoop:
    def __init__(self, *, model, schedule_sampler, microbatch, lr, ema_rate, lr_anneal_steps):
        self.model, self.schedule_sampler, self.microbatch, self.lr = model, schedule_sampler, microbatch, lr
        self.ema_rate = [float(x) for x in ema_rate.split(",")]
        self.lr_anneal_steps, self.step = lr_anneal_steps, 0
        self.model_params = self.master_params = list(model.parameters())
        self.opt = torch.optim.AdamW(self.master_params, lr=lr)
        self.ema_params = [copy.deepcopy(self.master_params) for _ in self.ema_rate]
        self.ddp_model = DDP(model, bucket_cap_mb=1)

    def run_loop(self):
        training = relight.Training(model=self.ddp_model, optimizer=self.opt, data=lambda n: torch.randn(8, 5))
        for step in training.steps(until=self.lr_anneal_steps):
            with step as batch:
                self.run_step(batch)
                if self.step % 4 == 0:
                    get_current().dumpkvs()
                self.step += 1

    def run_step(self, batch):
        self.forward_backward(batch)
        self.optimize_normal()
        get_current().logkv_mean("step", self.step)

    def losses(self, x, t):
        noise = torch.randn_like(x)
        a = (1 - t.float() / 6)[:, None]
        pred = self.ddp_model(torch.cat([a * x + (1 - a) * noise, a], 1))
        return (pred - noise).square().mean(1)

    def forward_backward(self, batch):
        self.opt.zero_grad()
        for i in range(0, batch.shape[0], self.microbatch):
            micro = batch[i : i + self.microbatch]
            last_batch = (i + self.microbatch) >= batch.shape[0]
            t, weights = self.schedule_sampler.sample(micro.shape[0])
            compute = functools.partial(self.losses, micro, t)
            if last_batch:
                losses = compute()
            else:
                with self.ddp_model.no_sync():
                    losses = compute()
            if isinstance(self.schedule_sampler, LossAwareSampler):
                self.schedule_sampler.update_with_local_losses(t, losses.detach())
            loss = (losses * weights).mean()
            logkv_mean("loss", loss.item())
            loss.backward()

    def optimize_normal(self):
        logkv_mean("grad_norm", sum((p.grad**2).sum().item() for p in self.master_params) ** 0.5)
        frac_done = self.step / self.lr_anneal_steps
        for group in self.opt.param_groups:
            group["lr"] = self.lr * (1 - frac_done)
        self.opt.step()
        for rate, params in zip(self.ema_rate, self.ema_params):
            update_ema(params, self.master_params, rate=rate)


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 5))
    loop = TrainLoop(
        model=net,
        schedule_sampler=LossSecondMomentResampler(6),
        microbatch=4,
        lr=5e-3,
        ema_rate="0.9,0.99",
        lr_anneal_steps=16,
    )
    loop.run_loop()
    finish(
        job,
        model=loop.ddp_model,
        opt=loop.opt,
        ema=loop.ema_params,
        history=loop.schedule_sampler._loss_history,
        counts=loop.schedule_sampler._loss_counts,
        log=get_current().dumped,
        step=loop.step,
    )
