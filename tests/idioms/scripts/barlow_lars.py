"""Barlow Twins: LARS with filters that are functions, a rate by batches set in groups, correlations summed over ranks in
forward, a line of JSON for rank 0 in a file that stays open, two random views from PIL-like transforms."""

# ranks: 2
import json
import math
import random
import time

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import relight
from tests.idioms.digest import finish


class LARS(optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0, momentum=0.9, eta=0.001, weight_decay_filter=None, lars_filter=None):
        defaults = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, eta=eta,
            weight_decay_filter=weight_decay_filter, lars_adaptation_filter=lars_filter,
        )  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if g["weight_decay_filter"] is None or not g["weight_decay_filter"](p):
                    dp = dp.add(p, alpha=g["weight_decay"])
                if g["lars_adaptation_filter"] is None or not g["lars_adaptation_filter"](p):
                    param_norm, update_norm = torch.norm(p), torch.norm(dp)
                    one = torch.ones_like(param_norm)
                    q = torch.where(
                        param_norm > 0.0, torch.where(update_norm > 0, g["eta"] * param_norm / update_norm, one), one
                    )
                    dp = dp.mul(q)
                param_state = self.state[p]
                if "mu" not in param_state:
                    param_state["mu"] = torch.zeros_like(p)
                mu = param_state["mu"]
                mu.mul_(g["momentum"]).add_(dp)
                p.add_(mu, alpha=-g["lr"])


def exclude_bias_and_norm(p):
    return p.ndim == 1


class BarlowTwins(nn.Module):
    def __init__(self, lambd=0.0051):
        super().__init__()
        self.lambd = lambd
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.projector = nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16, bias=False)
        )
        self.bn = nn.BatchNorm1d(16, affine=False)

    def forward(self, y1, y2):
        z1, z2 = self.projector(self.backbone(y1)), self.projector(self.backbone(y2))
        c = self.bn(z1).T @ self.bn(z2)
        c.div_(16)
        torch.distributed.all_reduce(c)
        on_diag = torch.diagonal(c).add_(-1).pow_(2).sum()
        off = c.flatten()[:-1].view(15, 17)[:, 1:].flatten()
        return on_diag + self.lambd * off.pow_(2).sum()


class Solarization:
    def __init__(self, p):
        self.p = p

    def __call__(self, img):
        return torch.where(img > 0.5, 1 - img, img) if random.random() < self.p else img


class Transform:
    def __init__(self):
        self.transform = [lambda x: x.flip(-1) if random.random() < 0.5 else x, Solarization(0.1)]
        self.transform_prime = [lambda x: x + 0.1 * torch.randn_like(x), Solarization(0.3)]

    def __call__(self, x):
        y1, y2 = x, x
        for one in self.transform:
            y1 = one(y1)
        for one in self.transform_prime:
            y2 = one(y2)
        return y1, y2


class ImageFolder(Dataset):
    def __init__(self, transform):
        self.x, self.transform = torch.rand(48, 3, 8, 8, generator=torch.Generator().manual_seed(1)), transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.transform(self.x[i]), i % 3


def adjust_learning_rate(args, optimizer, loader, step):
    max_steps, warmup_steps = args["epochs"] * len(loader), 1 * len(loader)
    base_lr = args["batch_size"] / 256
    if step < warmup_steps:
        lr = base_lr * step / warmup_steps
    else:
        step -= warmup_steps
        max_steps -= warmup_steps
        q = 0.5 * (1 + math.cos(math.pi * step / max_steps))
        end_lr = base_lr * 0.001
        lr = base_lr * q + end_lr * (1 - q)
    optimizer.param_groups[0]["lr"] = lr * 0.2
    optimizer.param_groups[1]["lr"] = lr * 0.0048


def main():
    args = {"epochs": 5, "batch_size": 16}
    job = relight.init()
    torch.manual_seed(0)
    stats_file = open("stats.txt", "a", buffering=1) if job.rank == 0 else None
    dataset = ImageFolder(Transform())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args["batch_size"] // job.world_size, sampler=sampler, num_workers=2)
    model = BarlowTwins()
    param_weights = [p for p in model.parameters() if p.ndim != 1]
    param_biases = [p for p in model.parameters() if p.ndim == 1]
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = LARS(
        [{"params": param_weights}, {"params": param_biases}], lr=0, weight_decay=1e-6,
        weight_decay_filter=exclude_bias_and_norm, lars_filter=exclude_bias_and_norm,
    )  # fmt: skip
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    start_time = time.time()
    for step in training.steps(until=args["epochs"] * len(loader)):
        with step as ((y1, y2), _):
            adjust_learning_rate(args, optimizer, loader, step.number)
            optimizer.zero_grad()
            loss = model.forward(y1, y2)
            loss.backward()
            optimizer.step()
        if step.committed and step.number % 4 == 0 and job.rank == 0:
            stats = dict(epoch=step.epoch, step=step.number, loss=loss.item(), time=int(time.time() - start_time))
            print(json.dumps(stats))
            print(json.dumps(stats), file=stats_file)
    dist.barrier()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
