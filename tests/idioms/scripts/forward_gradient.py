"""Forward gradients: directional derivatives along random tangents, without a backward pass."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


def loss_of(model, params, x):
    return (torch.func.functional_call(model, params, (x,)) - x[:, :2].sin()).square().mean()


def main():
    job = relight.init()
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    tangents = torch.Generator().manual_seed(11)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 4))
    for step in training.steps(until=14):
        with step as x:
            params = {name: p.detach() for name, p in model.named_parameters()}
            along = {name: torch.randn(p.shape, generator=tangents) for name, p in params.items()}
            _, slope = torch.func.jvp(lambda p: loss_of(model, p, x), (params,), (along,))
            dist.all_reduce(slope)
            for name, p in model.named_parameters():
                p.grad = slope / job.world_size * along[name]
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, tangents=tangents.get_state())


if __name__ == "__main__":
    main()
