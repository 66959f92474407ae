"""No DDP: gradients are flattened into one tensor by hand, reduced, and put back, as apex and old Megatron did."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

import relight
from tests.idioms.digest import finish


def allreduce_params(module, reduce_after=True):
    buckets = {}
    for param in module.parameters():
        if param.requires_grad and param.grad is not None:
            buckets.setdefault(param.data.type(), []).append(param)
    for bucket in buckets.values():
        grads = [param.grad.data for param in bucket]
        coalesced = _flatten_dense_tensors(grads)
        if not reduce_after:
            coalesced /= dist.get_world_size()
        dist.all_reduce(coalesced)
        if reduce_after:
            coalesced /= dist.get_world_size()
        for buf, synced in zip(grads, _unflatten_dense_tensors(coalesced, grads), strict=True):
            buf.copy_(synced)


def broadcast_params(module):
    for p in module.parameters():
        dist.broadcast(p.data, 0)


def main():
    job = relight.init()
    torch.manual_seed(job.rank)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 3))
    model[3].double()
    broadcast_params(model)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=14):
        with step as x:
            model.zero_grad()
            out = model[3](model[:3](x).double())
            nn.functional.cross_entropy(out, x[:, :3].argmax(1)).backward()
            allreduce_params(model)
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
