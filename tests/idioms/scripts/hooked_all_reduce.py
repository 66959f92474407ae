"""Overlap by hand: each parameter's hook starts its own all-reduce, and a list of handles is waited for before step."""

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


class Overlapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.handles = []
        self.world = dist.get_world_size()
        seen = set()
        for p in module.parameters():
            dist.broadcast(p.data, src=0)
            if p.requires_grad and id(p) not in seen:
                seen.add(id(p))
                p.register_post_accumulate_grad_hook(self._hook)

    def _hook(self, p):
        p.grad.div_(self.world)
        self.handles.append(dist.all_reduce(p.grad, async_op=True))

    def finish_gradient_synchronization(self):
        for handle in self.handles:
            handle.wait()
        self.handles.clear()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def main():
    job = relight.init()
    torch.manual_seed(9 + job.rank)
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    model = Overlapped(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, nesterov=True, momentum=0.9, weight_decay=1e-3)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 6))
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x.flip(1)).abs().mean().backward()
            model.finish_gradient_synchronization()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
