"""A metric in the shape of torchmetrics, with states in lists, and a loss that is weighted by what it last computed."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self._defaults, self._computed, self._update_count = {}, None, 0

    def add_state(self, name, default):
        self._defaults[name] = default.clone() if isinstance(default, torch.Tensor) else []
        setattr(self, name, default)

    def reset(self):
        for name, default in self._defaults.items():
            setattr(self, name, default.clone() if isinstance(default, torch.Tensor) else [])
        self._computed, self._update_count = None, 0

    def forward(self, *args):
        self._update_count += 1
        self._computed = None
        return self.update(*args)


class Accuracy(Metric):
    def __init__(self, classes):
        super().__init__()
        self.add_state("tp", torch.zeros(classes))
        self.add_state("total", torch.zeros(classes))
        self.add_state("scores", [])

    def update(self, logits, y):
        hit = logits.argmax(1) == y
        self.tp += torch.bincount(y[hit], minlength=len(self.tp))
        self.total += torch.bincount(y, minlength=len(self.total))
        self.scores.append(logits.detach().max(1).values)

    def compute(self):
        if self._computed is None:
            tp, total = self.tp.clone(), self.total.clone()
            dist.all_reduce(tp)
            dist.all_reduce(total)
            self._computed = (tp + 1) / (total + 1)
        return self._computed


def main():
    job = relight.init()
    torch.manual_seed(41 + job.rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    metric = Accuracy(3)
    weights = torch.ones(3)
    training = relight.Training(
        model={"model": model, "metric": metric},
        optimizer=optimizer,
        data=lambda n: (torch.randn(5, 6), torch.randint(0, 3, (5,))),
    )
    for step in training.steps(until=17):
        with step as (x, y):
            logits = model(x)
            metric(logits, y)
            loss = F.cross_entropy(logits, y, weight=weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step.number % 4 == 3:
                weights = 1 / metric.compute()
                metric.reset()
    finish(job, model=model, optimizer=optimizer, weights=weights, tp=metric.tp, scores=metric.scores)


if __name__ == "__main__":
    main()
