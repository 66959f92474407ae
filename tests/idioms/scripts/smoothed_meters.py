"""Meters of a reference script: `log_every` is a generator around the steps, meters of deques, times of the clock."""

# ranks: 2
import time
from collections import defaultdict, deque

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class SmoothedValue:
    def __init__(self, window_size=20):
        self.deque = deque(maxlen=window_size)
        self.total = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def update(self, **kwargs):
        for k, v in kwargs.items():
            self.meters[k].update(v.item() if isinstance(v, torch.Tensor) else v)

    def __getattr__(self, attr):
        if attr in self.__dict__.get("meters", {}):
            return self.meters[attr]
        raise AttributeError(attr)

    def log_every(self, iterable, print_freq, header):
        i = 0
        start_time = end = time.time()
        iter_time, data_time = SmoothedValue(), SmoothedValue()
        for obj in iterable:
            data_time.update(time.time() - end)
            yield obj
            iter_time.update(time.time() - end)
            if i % print_freq == 0:
                print(header, i, f"{iter_time.median:.4f}", flush=True)
            i += 1
            end = time.time()
        print(f"{header} total {time.time() - start_time:.1f}", flush=True)


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1)
        correct = pred.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


def main():
    job = relight.init()
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    dataset = TensorDataset(torch.randn(64, 10, generator=generator), torch.randint(0, 7, (64,), generator=generator))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, job.world_size, job.rank))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 7)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    metric_logger = MetricLogger()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for step in metric_logger.log_every(training.steps(until=16), 5, "Epoch"):
        with step as (image, target):
            output = model(image)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            metric_logger.update(loss=loss, lr=optimizer.param_groups[0]["lr"])
            metric_logger.meters["acc1"].update(acc1.item(), n=image.shape[0])
            metric_logger.meters["acc5"].update(acc5.item(), n=image.shape[0])
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
