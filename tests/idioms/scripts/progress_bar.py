"""The loop runs over a progress bar around the steps; learning rate and decay come from arrays made before."""

# ranks: 2
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Bar:
    """A progress bar around an iterable."""

    def __init__(self, iterable, total, disable):
        self.iterable, self.total, self.disable, self.n, self.postfix = iterable, total, disable, 0, ""

    def __iter__(self):
        for obj in self.iterable:
            yield obj
            self.n += 1
            if not self.disable and self.n % 5 == 0:
                print(f"{self.n}/{self.total} {self.postfix}", flush=True)

    def set_postfix(self, **kwargs):
        self.postfix = ", ".join(f"{key}={value}" for key, value in kwargs.items())


def cosine_scheduler(base, final, steps, warmup=3):
    ramp = np.linspace(0, base, warmup)
    rest = np.arange(steps - warmup)
    return np.concatenate((ramp, final + 0.5 * (base - final) * (1 + np.cos(np.pi * rest / len(rest)))))


def main():
    job = relight.init()
    torch.manual_seed(17)
    net = DDP(nn.Sequential(nn.Linear(4, 12), nn.SiLU(), nn.Linear(12, 4)))
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    lrs, wds = cosine_scheduler(0.05, 1e-3, 15), cosine_scheduler(0.4, 0.04, 15)
    training = relight.Training(model=net, optimizer=optimizer, data=lambda n: torch.randn(6, 4))
    bar = Bar(training.steps(until=15), total=15, disable=job.rank != 0)
    for step in bar:
        with step as x:
            it = step.number
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = lrs[it], wds[it]
            optimizer.zero_grad()
            loss = (net(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    finish(job, net=net, optimizer=optimizer, lr=float(optimizer.param_groups[0]["lr"]))


if __name__ == "__main__":
    main()
