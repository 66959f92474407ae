"""Values of every kind in a module's globals, class attributes, function attributes, defaults and cells."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish
from tests.idioms.kinds import ITERATORS, KINDS, chosen, word


class Scales(nn.Module):
    """One number for each kind."""

    def __init__(self, kinds):
        super().__init__()
        self.scales = nn.ParameterDict({word(kind): nn.Parameter(torch.ones(())) for kind in kinds})

    def forward(self, x, factors):
        return sum((x * scale * factors[kind] - 1).square().mean() for kind, scale in self.scales.items())


KEPT = {}


class Config:
    held = {}


def remember(name, kind, x, kept={}):  # noqa: B006
    if name not in kept:
        kept[name] = kind.start()
    number = kind.number(kept[name])
    kept[name] = kind.update(kept[name], x)
    return number


def smooth(name, kind, x):
    number = kind.number(smooth.held[name])
    smooth.held[name] = kind.update(smooth.held[name], x)
    return number


smooth.held = {}


def counter(kind):
    held = kind.start()

    def count(x):
        nonlocal held
        number = kind.number(held)
        held = kind.update(held, x)
        return number

    return count


def main():
    job = relight.init()
    torch.manual_seed(3)
    kinds = chosen(leave_out=ITERATORS)
    net = Scales(kinds)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    counts = {}
    for name, kind in kinds.items():
        KEPT[name], smooth.held[name], counts[name] = kind.start(), kind.start(), counter(kind)
        setattr(Config, word(name), kind.start())
    local = {name: kind.start() for name, kind in kinds.items()}
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=12):
        with step as x:
            factors = {}
            mean = x.mean().clamp(-3, 3).item()
            for name, kind in kinds.items():
                number = kind.number(KEPT[name]) + kind.number(getattr(Config, word(name))) + kind.number(local[name])
                number += remember(name, kind, mean) + smooth(name, kind, mean) + counts[name](mean)
                factors[word(name)] = 1 + 0.01 * number
                KEPT[name] = kind.update(KEPT[name], mean)
                local[name] = kind.update(local[name], mean)
                setattr(Config, word(name), kind.update(getattr(Config, word(name)), mean))
            optimizer.zero_grad()
            model(x, factors).backward()
            optimizer.step()
    finish(job, **{name: scale for name, scale in net.scales.items()})


if __name__ == "__main__":
    main()
