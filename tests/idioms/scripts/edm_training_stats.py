"""EDM's training loop: statistics reported into module globals and collected now and then, an endless sampler, EMA by
halflife with a ramp, rate by images seen, images and ticks counted in variables."""

# ranks: 2
import copy
import re
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import relight
from tests.idioms.digest import finish

_num_moments = 3
_counters, _cumulative = {}, {}


def report(name, value):
    if name not in _counters:
        _counters[name] = {}
    elems = torch.as_tensor(value).detach().flatten().to(torch.float32)
    moments = torch.stack([torch.ones_like(elems).sum(), elems.sum(), elems.square().sum()]).to(torch.float64)
    if elems.device not in _counters[name]:
        _counters[name][elems.device] = torch.zeros_like(moments)
    _counters[name][elems.device].add_(moments)
    return value


def _sync(names):
    deltas = []
    for name in names:
        delta = torch.zeros([_num_moments], dtype=torch.float64)
        for counter in _counters[name].values():
            delta.add_(counter)
            counter.copy_(torch.zeros_like(counter))
        deltas.append(delta)
    deltas = torch.stack(deltas)
    dist.all_reduce(deltas)
    for idx, name in enumerate(names):
        if name not in _cumulative:
            _cumulative[name] = torch.zeros([_num_moments], dtype=torch.float64)
        _cumulative[name].add_(deltas[idx])
    return [(name, _cumulative[name]) for name in names]


class Collector:
    def __init__(self, regex=".*", keep_previous=True):
        self._regex, self._keep_previous = re.compile(regex), keep_previous
        self._cumulative, self._moments = {}, {}
        self.update()
        self._moments.clear()

    def names(self):
        return [name for name in _counters if self._regex.fullmatch(name)]

    def update(self):
        if not self._keep_previous:
            self._moments.clear()
        for name, cumulative in _sync(self.names()) if self.names() else []:
            if name not in self._cumulative:
                self._cumulative[name] = torch.zeros([_num_moments], dtype=torch.float64)
            delta = cumulative - self._cumulative[name]
            self._cumulative[name].copy_(cumulative)
            if float(delta[0]) != 0:
                self._moments[name] = delta

    def mean(self, name):
        delta = self._moments[name]
        return float(delta[1] / delta[0])

    def as_dict(self):
        return {name: dict(num=float(self._moments[name][0]), mean=self.mean(name)) for name in sorted(self._moments)}


class InfiniteSampler(Sampler):
    def __init__(self, dataset, rank=0, num_replicas=1, shuffle=True, seed=0, window_size=0.5):
        self.dataset, self.rank, self.num_replicas = dataset, rank, num_replicas
        self.shuffle, self.seed, self.window_size = shuffle, seed, window_size

    def __iter__(self):
        order = np.arange(len(self.dataset))
        rnd, window = None, 0
        if self.shuffle:
            rnd = np.random.RandomState(self.seed)
            rnd.shuffle(order)
            window = int(np.rint(order.size * self.window_size))
        idx = 0
        while True:
            i = idx % order.size
            if idx % self.num_replicas == self.rank:
                yield order[i]
            if window >= 2:
                j = (i - rnd.randint(window)) % order.size
                order[i], order[j] = order[j], order[i]
            idx += 1


class EDMLoss:
    def __init__(self, P_mean=-1.2, P_std=1.2, sigma_data=0.5):
        self.P_mean, self.P_std, self.sigma_data = P_mean, P_std, sigma_data

    def __call__(self, net, images):
        sigma = (torch.randn([len(images), 1]) * self.P_std + self.P_mean).exp()
        weight = (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2
        noise = torch.randn_like(images) * sigma
        return weight * ((net(torch.cat([images + noise, sigma.log()], 1)) - images) ** 2)


def training_loop(total_kimg=0.32, batch_size=16, batch_gpu=4, ema_halflife_kimg=0.05, ema_rampup_ratio=0.05):
    job = relight.init()
    np.random.seed(job.rank)
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(60, 6))
    num_accumulation_rounds = batch_size // (batch_gpu * job.world_size)
    loader = DataLoader(dataset, batch_gpu, sampler=InfiniteSampler(dataset, job.rank, job.world_size))
    net = nn.Sequential(nn.Linear(7, 32), nn.SiLU(), nn.Linear(32, 6))
    ddp = nn.parallel.DistributedDataParallel(net)
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    loss_fn, collector = EDMLoss(), Collector()
    training = relight.Training(
        model=ddp, optimizer=optimizer, ema=ema, data=loader, accumulate=num_accumulation_rounds
    )
    cur_nimg, cur_tick, tick_start_nimg, stats = 0, 0, 0, {}
    tick_start_time = time.time()
    for step in training.steps(until=int(total_kimg * 1000) // batch_size):
        with step as rounds:
            optimizer.zero_grad(set_to_none=True)
            for round_idx, (images,) in enumerate(rounds):
                ddp.require_backward_grad_sync = round_idx == num_accumulation_rounds - 1
                loss = loss_fn(net=ddp, images=images)
                report("Loss/loss", loss)
                loss.sum().mul(1 / batch_gpu).backward()
            for g in optimizer.param_groups:
                g["lr"] = 1e-3 * min(cur_nimg / max(0.1 * 1000, 1e-8), 1)
            for param in net.parameters():
                if param.grad is not None:
                    torch.nan_to_num(param.grad, nan=0, posinf=1e5, neginf=-1e5, out=param.grad)
            optimizer.step()
            ema_halflife_nimg = ema_halflife_kimg * 1000
            ema_halflife_nimg = min(ema_halflife_nimg, cur_nimg * ema_rampup_ratio)
            ema_beta = 0.5 ** (batch_size / max(ema_halflife_nimg, 1e-8))
            for p_ema, p_net in zip(ema.parameters(), net.parameters()):
                p_ema.copy_(p_net.detach().lerp(p_ema, ema_beta))
            cur_nimg += batch_size
            if cur_nimg < tick_start_nimg + 64:
                continue
            report("Timing/none", time.time() * 0 - tick_start_time * 0)
            collector.update()
            stats = collector.as_dict()
            cur_tick += 1
            tick_start_nimg = cur_nimg
            tick_start_time = time.time()
    finish(job, net=net, ema=ema, optimizer=optimizer, nimg=cur_nimg, tick=cur_tick, stats=stats)


if __name__ == "__main__":
    training_loop()
