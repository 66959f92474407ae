"""Hooks of modules, tensors, gradients and optimizers keep values of every kind."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish
from tests.idioms.kinds import ITERATORS, KINDS, chosen, word


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


class Keeper:
    """A hook that is an object."""

    def __init__(self, kind):
        self.kind, self.held = kind, kind.start()

    def __call__(self, module, inputs, output):
        out = output * (1 + 0.01 * self.kind.number(self.held))
        self.held = self.kind.update(self.held, output.detach().mean().clamp(-3, 3).item())
        return out


def before(kind):
    """A hook that is a closure."""
    held = kind.start()

    def hook(module, inputs):
        nonlocal held
        factor = 1 + 0.01 * kind.number(held)
        held = kind.update(held, inputs[0].detach().mean().clamp(-3, 3).item())
        return (inputs[0] * factor,)

    return hook


def of_gradient(kind):
    """A hook that keeps its value in a dict."""
    kept = {"held": kind.start()}

    def hook(gradient):
        factor = 1 + 0.01 * kind.number(kept["held"])
        kept["held"] = kind.update(kept["held"], gradient.clamp(-3, 3).item())
        return gradient * factor

    return hook


def accumulated(kind):
    kept = [kind.start()]

    def hook(parameter):
        parameter.grad.mul_(1 + 0.01 * kind.number(kept[0]))
        kept[0] = kind.update(kept[0], parameter.grad.clamp(-3, 3).item())

    return hook


def main():
    job = relight.init()
    torch.manual_seed(3)
    kinds = chosen(leave_out=ITERATORS)
    rows = nn.ModuleDict({word(name): Row() for name in kinds})
    for name, kind in kinds.items():
        row = rows[word(name)]
        row.register_forward_hook(Keeper(kind))
        row.register_forward_pre_hook(before(kind))
        row.scale.register_hook(of_gradient(kind))
        row.scale.register_post_accumulate_grad_hook(accumulated(kind))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = rows

        def forward(self, x):
            return sum((row(x) - 1).square().mean() for row in self.rows.values())

    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    stepped = {name: kind.start() for name, kind in kinds.items()}

    def after_step(optimizer, args, kwargs):
        with torch.no_grad():
            for name, kind in kinds.items():
                scale = rows[word(name)].scale
                scale.mul_(1 + 0.001 * kind.number(stepped[name]))
                stepped[name] = kind.update(stepped[name], scale.clamp(-3, 3).item())

    optimizer.register_step_post_hook(after_step)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=12):
        with step as x:
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    finish(job, **{name: row.scale for name, row in rows.items()})


if __name__ == "__main__":
    main()
