"""A sampled part of the class weights trains in each step: its momentum moves in and out of the optimizer."""

# ranks: 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class PartialFC(nn.Module):
    def __init__(self, classes, dim, sampled):
        super().__init__()
        self.classes, self.sampled = classes, sampled
        self.register_buffer("weight", torch.normal(0, 0.1, (classes, dim)))
        self.register_buffer("weight_mom", torch.zeros(classes, dim))
        self.weight_activated = nn.Parameter(torch.zeros(sampled, dim))
        self.weight_activated_mom = torch.empty(0)
        self.weight_index = torch.zeros(0, dtype=torch.long)
        self.first = True

    @torch.no_grad()
    def sample(self, labels, optimizer):
        perm = torch.rand(self.classes, generator=torch.Generator().manual_seed(int(labels.sum())))
        perm[labels.unique()] = 2.0
        self.weight_index = torch.topk(perm, self.sampled)[1].sort()[0]
        optimizer.state.pop(optimizer.param_groups[-1]["params"][0], None)
        self.weight_activated.data = self.weight[self.weight_index]
        self.weight_activated_mom = self.weight_mom[self.weight_index]
        optimizer.param_groups[-1]["params"][0] = self.weight_activated
        optimizer.state[self.weight_activated]["momentum_buffer"] = self.weight_activated_mom
        return torch.searchsorted(self.weight_index, labels)

    @torch.no_grad()
    def update(self):
        self.weight_mom[self.weight_index] = self.weight_activated_mom
        self.weight[self.weight_index] = self.weight_activated


def main():
    job = relight.init()
    torch.manual_seed(59)
    backbone = DDP(nn.Linear(6, 4))
    head = PartialFC(20, 4, 8)
    optimizer = torch.optim.SGD(
        [{"params": list(backbone.parameters())}, {"params": [head.weight_activated]}], 0.05, momentum=0.9
    )
    training = relight.Training(model={"backbone": backbone, "head": head}, optimizer=optimizer)
    for step in training.steps(until=14):
        with step:
            shared = torch.Generator().manual_seed(step.number)
            labels = torch.randint(0, 20, (5,), generator=shared)
            x = torch.randn(5, 6)
            target = head.sample(labels, optimizer)
            optimizer.zero_grad()
            F.cross_entropy(backbone(x) @ head.weight_activated.T, target).backward()
            dist.all_reduce(head.weight_activated.grad)
            optimizer.step()
            head.update()
    finish(job, backbone=backbone, weight=head.weight, mom=head.weight_mom)


if __name__ == "__main__":
    main()
