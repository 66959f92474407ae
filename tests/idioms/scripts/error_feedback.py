"""Gradients without DDP: the largest entries of each rank are exchanged, and the rest waits in a residual of its own."""

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


class TopKCompressor:
    def __init__(self, ratio):
        self.ratio = ratio
        self.residuals = {}

    def compress(self, tensor, name):
        tensor = tensor.flatten()
        if name in self.residuals:
            tensor = tensor + self.residuals[name]
        k = max(1, int(tensor.numel() * self.ratio))
        _, indices = torch.topk(tensor.abs(), k, sorted=False)
        values = torch.gather(tensor, 0, indices)
        decompressed = torch.zeros_like(tensor).scatter_(0, indices, values)
        self.residuals[name] = tensor - decompressed
        return values, indices


class Allgather:
    def __init__(self, compressor, world_size):
        self.compressor, self.world_size = compressor, world_size

    def exchange(self, tensor, name):
        values, indices = self.compressor.compress(tensor, name)
        all_values = [torch.empty_like(values) for _ in range(self.world_size)]
        all_indices = [torch.empty_like(indices) for _ in range(self.world_size)]
        handles = [
            dist.all_gather(all_values, values, async_op=True),
            dist.all_gather(all_indices, indices, async_op=True),
        ]
        for handle in handles:
            handle.wait()
        out = torch.zeros(tensor.numel())
        for v, i in zip(all_values, all_indices):
            out.scatter_add_(0, i, v)
        return out.view_as(tensor) / self.world_size


job = relight.init()
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2))
grace = Allgather(TopKCompressor(0.25), dist.get_world_size())
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(5, 6))
for step in training.steps(until=18):
    with step as x:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x[:, :2].sin()).backward()
        for name, p in model.named_parameters():
            p.grad = grace.exchange(p.grad, name)
        optimizer.step()
finish(job, model=model, optimizer=optimizer, residuals=grace.compressor.residuals)
