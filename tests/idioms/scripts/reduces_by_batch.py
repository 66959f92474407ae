"""The rate is lowered before each evaluation, which reduces its meters after each batch, and again at its end."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, count=1):
        self.total += value * count
        self.count += count

    def synchronize(self):
        dist.barrier()
        both = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.all_reduce(both)
        self.total, self.count = both[0].item(), int(both[1])

    @property
    def mean(self):
        return self.total / max(self.count, 1)


def reduced(value):
    value = value.clone()
    dist.all_reduce(value)
    value /= dist.get_world_size()
    return value


@torch.no_grad()
def validate(model, loader, epoch):
    model.eval()
    losses, accuracies, own = Meter(), Meter(), Meter()
    for number, (x, y) in enumerate(loader):
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        accuracy = (output.argmax(1) == y).float().mean()
        losses.update(reduced(loss).item(), len(y))
        accuracies.update(reduced(accuracy).item(), len(y))
        own.update(loss.item() * (1 + number + epoch), len(y))
    own.synchronize()
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, {"rank": dist.get_rank(), "batches": number + 1})
    chosen = torch.tensor([losses.mean if dist.get_rank() == 0 else 0.0])
    dist.broadcast(chosen, 0)
    model.train()
    return accuracies.mean, own.mean + chosen.item(), sum(one["batches"] for one in seen)


def main():
    job = relight.init()
    torch.manual_seed(11)
    x, y = torch.randn(96, 6), torch.randint(0, 3, (96,))
    data, held = TensorDataset(x[:48], y[:48]), TensorDataset(x[48:], y[48:])
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    held_loader = DataLoader(held, batch_size=4, sampler=DistributedSampler(held, job.world_size, job.rank))
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    best, history = 0.0, []
    for epoch in training.epochs(4):
        for step in training.steps():
            with step as (x, y):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        scheduler.step()
        accuracy, own, batches = validate(net, held_loader, epoch)
        history.append((epoch, accuracy, own, batches, scheduler.get_last_lr()[0]))
        best = max(best, accuracy)
        if job.rank == 0:
            print(f"epoch {epoch}: {accuracy:.4f} {own:.4f} {batches} best {best:.4f}")
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler, best=best, history=history)


main()
