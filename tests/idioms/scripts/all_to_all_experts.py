"""Expert parallelism: tokens go to the rank of their expert by all_to_all and come back; gates are averaged by hand."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out


class Layer(nn.Module):
    def __init__(self, d, world):
        super().__init__()
        self.gate = nn.Linear(d, world, bias=False)
        self.experts = nn.ModuleList(nn.Linear(d, d) for _ in range(world))
        self.world = world

    def forward(self, x, rank):
        weights = self.gate(x).softmax(-1)
        sent = torch.cat([x * weights[:, i : i + 1] for i in range(self.world)])
        received = AllToAll.apply(sent)
        back = AllToAll.apply(torch.tanh(self.experts[rank](received)))
        return x + sum(back.chunk(self.world))


def main():
    job = relight.init()
    world = dist.get_world_size()
    torch.manual_seed(44)
    model = nn.Sequential(nn.Linear(5, 8))
    layer, head = Layer(8, world), nn.Linear(8, 1)
    model.append(layer)
    model.append(head)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            out = head(layer(model[0](x), job.rank))
            (out - x.sum(1, keepdim=True)).square().mean().backward()
            for p in model.parameters():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
                p.grad /= world
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
