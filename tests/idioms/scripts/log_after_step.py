"""Metrics averaged over ranks after optimizer.step(), inside the block, as most loops log; printed by rank 0."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.sum = self.count = 0.0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count])
        dist.all_reduce(total, dist.ReduceOp.SUM)
        return (total[0] / total[1]).item()


job = relight.init()
torch.manual_seed(41)
model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 5)).steps(until=18):
    with step as data:
        target = data[:, :4].argmax(1)
        output = model(data)
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses, top1 = AverageMeter(), AverageMeter()
        losses.update(loss.item(), len(data))
        top1.update((output.argmax(1) == target).float().mean().item(), len(data))
        mean_loss, mean_top1 = losses.all_reduce(), top1.all_reduce()
    if job.rank == 0 and step.committed and step.number % 6 == 0:
        print(f"Step {step.number}: loss {mean_loss:.3f} top1 {mean_top1:.3f}")
finish(job, model=model, optimizer=optimizer)
