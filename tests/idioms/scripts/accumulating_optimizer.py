"""A wrapper that accumulates gradients in buffers of its own and lets the inner optimizer step every third time."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class GradAccumulator:
    """Looks like an optimizer; `step` writes only when enough gradients have come."""

    def __init__(self, optimizer, every):
        self.optimizer, self.every, self._calls = optimizer, every, 0
        self._sums = None

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def _params(self):
        for group in self.param_groups:
            yield from group["params"]

    def zero_grad(self):
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self):
        if self._sums is None:
            self._sums = [torch.zeros_like(p) for p in self._params]
        for total, p in zip(self._sums, self._params):
            total.add_(p.grad)
        self._calls += 1
        if self._calls % self.every:
            return False
        for total, p in zip(self._sums, self._params):
            p.grad.copy_(total / self.every)
            total.zero_()
        self.optimizer.step()
        return True


class WarmupPolyLR(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, total, power=0.9, warmup=2, last_epoch=-1):
        self.total, self.power, self.warmup = total, power, warmup
        super().__init__(optimizer, last_epoch)

    def get_lr(self):
        i = self.last_epoch
        factor = (i + 1) / self.warmup if i < self.warmup else (1 - (i - self.warmup) / self.total) ** self.power
        return [base * factor for base in self.base_lrs]


def main():
    job = relight.init()
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(7, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2)))
    inner = torch.optim.NAdam(model.parameters(), lr=0.01)
    optimizer = GradAccumulator(inner, 3)
    scheduler = WarmupPolyLR(inner, 10)
    training = relight.Training(
        model=model, optimizer=inner, scheduler=scheduler, data=lambda n: (torch.randn(6, 7), torch.randint(0, 2, (6,)))
    )
    updates = 0
    for step in training.steps(until=18):
        with step as (x, y):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if optimizer.step():
                updates += 1
                scheduler.step()
    finish(job, model=model, inner=inner, sums=optimizer._sums, updates=updates, scheduler=scheduler)


if __name__ == "__main__":
    main()
