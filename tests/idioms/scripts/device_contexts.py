"""A default device for the whole script, others for a moment, a default type for a moment, and `torch.func` inside."""

# ranks: 2
import contextlib

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def main():
    job = relight.init()
    torch.set_default_device("cpu")
    torch.manual_seed(306)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    norms = torch.zeros(())

    def loss_of(weights, x):
        return (functional_call(net, weights, (x[None],)) - x[:3]).square().mean()

    for step in training.steps(until=14):
        with step as x:
            with torch.device("meta"):
                size = nn.Linear(6, 3).weight.numel()
            with default_dtype(torch.float64):
                exact = torch.ones(3) / size
            weights = {name: p.detach() for name, p in net.named_parameters()}
            each = vmap(grad(loss_of), in_dims=(None, 0))(weights, x)
            norms = 0.9 * norms + sum(g.square().sum() for g in each.values())
            optimizer.zero_grad()
            loss = (model(x) - x[:, :3] * exact.float()).square().mean() / (1 + norms)
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, norms=norms)


if __name__ == "__main__":
    main()
