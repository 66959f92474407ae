"""A detector's loop: warm-up of each group by interpolation, accumulation that grows, sizes that vary, running means."""

# ranks: 2
import copy
import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ModelEMA:
    def __init__(self, model, decay=0.99, tau=5, updates=0):
        self.ema = copy.deepcopy(model).eval()
        self.updates = updates
        self.decay = lambda x: decay * (1 - math.exp(-x / tau))
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        self.updates += 1
        d = self.decay(self.updates)
        msd = model.state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v *= d
                v += (1 - d) * msd[k].detach()


class Detect(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.head = nn.Conv2d(8, 5, 1)
        self.stride = torch.tensor([8.0])

    def forward(self, x):
        return self.head(self.backbone(x)).mean((2, 3))


def train():
    job = relight.init()
    torch.manual_seed(1 + job.rank)
    random.seed(1)
    np.random.seed(1)
    net = Detect()
    g = [], [], []
    for v in net.modules():
        if hasattr(v, "bias") and isinstance(v.bias, nn.Parameter):
            g[2].append(v.bias)
        if isinstance(v, nn.BatchNorm2d):
            g[1].append(v.weight)
        elif hasattr(v, "weight") and isinstance(v.weight, nn.Parameter):
            g[0].append(v.weight)
    optimizer = torch.optim.SGD(g[2], lr=0.02, momentum=0.937, nesterov=True)
    optimizer.add_param_group({"params": g[0], "weight_decay": 5e-4})
    optimizer.add_param_group({"params": g[1], "weight_decay": 0.0})
    lf = lambda x: (1 - x / 4) * (1.0 - 0.1) + 0.1  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lf)
    model = DDP(net)
    for p in model.parameters():
        torch.distributed.broadcast(p.data, 0)
    ema = ModelEMA(net)
    nb, nw, nbs, batch_size = 6, 8, 64, 16
    last_opt_step, accumulate, mloss = -1, 1, torch.zeros(3)
    training = relight.Training(
        model=model, optimizer=optimizer, scheduler=scheduler, ema=ema.ema, data=lambda n: torch.randn(4, 3, 8, 8)
    )
    for step in training.steps(until=4 * nb):
        i, epoch = step.number % nb, step.number // nb
        with step as imgs:
            ni = i + nb * epoch
            if i == 0:
                mloss = torch.zeros(3)
            if ni <= nw:
                xi = [0, nw]
                accumulate = max(1, np.interp(ni, xi, [1, nbs / batch_size]).round())
                for j, x in enumerate(optimizer.param_groups):
                    x["lr"] = np.interp(ni, xi, [0.1 if j == 0 else 0.0, x["initial_lr"] * lf(epoch)])
                    if "momentum" in x:
                        x["momentum"] = np.interp(ni, xi, [0.8, 0.937])
            sz = random.randrange(4, 12 + 4) // 4 * 4
            imgs = nn.functional.interpolate(imgs, size=(sz, sz), mode="bilinear", align_corners=False)
            pred = model(imgs)
            lbox, lobj = pred[:, :4].square().mean(), pred[:, 4].sigmoid().mean()
            loss = (lbox + lobj) * 2
            loss.backward()
            if ni - last_opt_step >= 1:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
                optimizer.step()
                optimizer.zero_grad()
                ema.update(net)
                last_opt_step = ni
            mloss = (mloss * i + torch.stack((lbox, lobj, loss)).detach()) / (i + 1)
            if i == nb - 1:
                scheduler.step()
    finish(job, model=model, optimizer=optimizer, ema=ema.ema, updates=ema.updates, mloss=mloss)


if __name__ == "__main__":
    train()
