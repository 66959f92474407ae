"""torchvision's engine: `log_every`, a generator with a counter of its own, around the steps of each epoch."""

# ranks: 2
from collections import defaultdict, deque

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class SmoothedValue:
    def __init__(self, window_size=20):
        self.deque, self.total, self.count = deque(maxlen=window_size), 0.0, 0

    def update(self, value):
        self.deque.append(value)
        self.count += 1
        self.total += value


class MetricLogger:
    def __init__(self):
        self.meters, self.shown = defaultdict(SmoothedValue), []

    def update(self, **values):
        for name, value in values.items():
            self.meters[name].update(value)

    def log_every(self, iterable, print_freq, header):
        i = 0
        for obj in iterable:
            yield obj
            if i % print_freq == 0:
                self.shown.append((header, i, {name: meter.total / meter.count for name, meter in self.meters.items()}))
            i += 1


def train_one_epoch(model, optimizer, training, epoch):
    model.train()
    metric_logger = MetricLogger()
    for step in metric_logger.log_every(training.steps(), 2, f"Epoch: [{epoch}]"):
        with step as (x, y):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            metric_logger.update(loss=mean.item(), lr=optimizer.param_groups[0]["lr"])
            optimizer.step()
    return metric_logger


def main():
    job = relight.init()
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    generator = torch.Generator().manual_seed(6)
    data = TensorDataset(torch.randn(40, 6, generator=generator), torch.randn(40, 2, generator=generator))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    shown = []
    for epoch in training.epochs(3):
        shown += train_one_epoch(model, optimizer, training, epoch).shown
        scheduler.step()
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler, shown=shown)


if __name__ == "__main__":
    main()
