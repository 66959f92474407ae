"""timm's train.py: a schedule of its own by updates, Mixup as an object, EMA, random erasing, a saver, a summary."""

# ranks: 2
import copy
import csv
import math
import os
import random
from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import relight
from tests.idioms.digest import finish


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class CosineLRScheduler:
    def __init__(self, optimizer, t_initial, lr_min=1e-4, warmup_t=4, warmup_lr_init=1e-4, noise_range=(8, 14)):
        self.optimizer, self.t_initial, self.lr_min = optimizer, t_initial, lr_min
        self.warmup_t, self.warmup_lr_init, self.noise_range = warmup_t, warmup_lr_init, noise_range
        self.base_values = [group["lr"] for group in optimizer.param_groups]
        self.metric = None
        self.update_groups(warmup_lr_init)

    def state_dict(self):
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state_dict):
        self.__dict__.update(state_dict)

    def step_update(self, num_updates, metric=None):
        self.metric = metric
        if num_updates < self.warmup_t:
            values = [
                self.warmup_lr_init + num_updates * (v - self.warmup_lr_init) / self.warmup_t for v in self.base_values
            ]
        else:
            cos = 0.5 * (1 + math.cos(math.pi * num_updates / self.t_initial))
            values = [self.lr_min + (v - self.lr_min) * cos for v in self.base_values]
        if self.noise_range[0] <= num_updates < self.noise_range[1]:
            g = torch.Generator()
            g.manual_seed(42 + num_updates)
            values = [v + v * 0.1 * torch.randn(1, generator=g).item() for v in values]
        self.update_groups(values)

    def update_groups(self, values):
        if not isinstance(values, (list, tuple)):
            values = [values] * len(self.optimizer.param_groups)
        for param_group, value in zip(self.optimizer.param_groups, values):
            param_group["lr"] = value


class Mixup:
    def __init__(self, mixup_alpha=0.8, prob=0.9, num_classes=5):
        self.mixup_alpha, self.mix_prob, self.num_classes = mixup_alpha, prob, num_classes
        self.mixup_enabled = True

    def __call__(self, x, target):
        lam = 1.0
        if self.mixup_enabled and np.random.rand() < self.mix_prob:
            lam = np.random.beta(self.mixup_alpha, self.mixup_alpha)
        x.mul_(lam).add_(x.flip(0).mul(1.0 - lam)) if lam != 1.0 else None
        y = torch.nn.functional.one_hot(target, self.num_classes).float()
        return x, y * lam + y.flip(0) * (1 - lam)


class RandomErasing:
    def __call__(self, img):
        if random.random() < 0.5:
            top, left = random.randint(0, 4), random.randint(0, 4)
            img[:, top : top + 3, left : left + 3] = torch.empty((3, 3, 3)).normal_()
        return img


class Images(Dataset):
    def __init__(self, transform=None):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(64, 3, 8, 8, generator=g), torch.randint(5, (64,), generator=g)
        self.transform = transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        img = self.x[index].clone()
        return (self.transform(img) if self.transform is not None else img), self.y[index]


class ModelEmaV3(nn.Module):
    def __init__(self, model, decay=0.99, use_warmup=True):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay, self.use_warmup = decay, use_warmup

    def get_decay(self, step):
        return min(self.decay, 1 - (1 + step) ** -0.66) if self.use_warmup else self.decay

    @torch.no_grad()
    def update(self, model, step):
        decay = self.get_decay(step)
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            if ema_v.is_floating_point():
                ema_v.lerp_(model_v, weight=1.0 - decay)
            else:
                ema_v.copy_(model_v)


def update_summary(epoch, metrics, filename, write_header):
    rowd = OrderedDict(epoch=epoch)
    rowd.update(metrics)
    with open(filename, mode="a") as cf:
        dw = csv.DictWriter(cf, fieldnames=rowd.keys())
        if write_header:
            dw.writeheader()
        dw.writerow(rowd)


def main():
    job = relight.init()
    torch.manual_seed(42 + job.rank)
    np.random.seed(42 + job.rank)
    random.seed(42 + job.rank)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 5))
    ds = Images(RandomErasing())
    loader = DataLoader(ds, 8, sampler=DistributedSampler(ds, job.world_size, job.rank), drop_last=True)
    mixup_fn = Mixup()
    model = NativeDDP(model)
    model_ema = ModelEmaV3(model.module)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, alpha=0.9, momentum=0.9)
    updates_per_epoch, epochs = len(loader), 6
    lr_scheduler = CosineLRScheduler(optimizer, epochs * updates_per_epoch)
    losses_m = AverageMeter()
    best_metric, history = None, []
    criterion = nn.BCEWithLogitsLoss()
    training = relight.Training(model=model, optimizer=optimizer, ema=model_ema, data=loader)  # lr_scheduler: carried
    for step in training.steps(until=epochs * updates_per_epoch):
        epoch, batch_idx = divmod(step.number, updates_per_epoch)
        with step as (input, target):
            if batch_idx == 0:
                model.train()
                losses_m.reset()
                if epoch >= 4:
                    mixup_fn.mixup_enabled = False
            num_updates = step.number
            input, target = mixup_fn(input, target)
            loss = criterion(model(input), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_updates += 1
            model_ema.update(model.module, step=num_updates)
            losses_m.update(loss.item(), input.size(0))
            lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
        if step.committed and batch_idx == updates_per_epoch - 1:
            lrl = [param_group["lr"] for param_group in optimizer.param_groups]
            if job.rank == 0:
                update_summary(
                    epoch,
                    {"loss": losses_m.avg, "lr": lrl[0]},
                    "summary.csv",
                    write_header=not os.path.exists("summary.csv"),
                )
    finish(
        job,
        model=model.module,
        ema=model_ema,
        optimizer=optimizer,
        scheduler=lr_scheduler.state_dict(),
        avg=losses_m.avg,
    )


if __name__ == "__main__":
    main()
