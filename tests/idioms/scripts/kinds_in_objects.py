"""Objects that nobody hands over keep values of every kind: a trainer, a loss module, a parameter's attribute."""

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


class Criterion(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds
        self.held = {name: kind.start() for name, kind in kinds.items()}

    def forward(self, x):
        factors = {}
        for name, kind in self.kinds.items():
            factors[word(name)] = 1 + 0.01 * kind.number(self.held[name])
            self.held[name] = kind.update(self.held[name], x.mean().clamp(-3, 3).item())
        return factors


class Trainer:
    def __init__(self, kinds):
        self.criterion = Criterion(kinds)
        self.kinds = kinds
        for name, kind in kinds.items():
            setattr(self, word(name), kind.start())

    def factors(self, x, scales):
        found = self.criterion(x)
        for name, kind in self.kinds.items():
            held = getattr(self, word(name))
            found[word(name)] += 0.01 * kind.number(held)
            setattr(self, word(name), kind.update(held, x.std().clamp(-3, 3).item()))
            scale = scales[word(name)]
            found[word(name)] += 0.01 * kind.number(scale.held)
            scale.held = kind.update(scale.held, x.max().clamp(-3, 3).item())
        return found


def main():
    job = relight.init()
    torch.manual_seed(3)
    kinds = chosen(leave_out=ITERATORS)
    net = Scales(kinds)
    for name, kind in kinds.items():
        net.scales[word(name)].held = kind.start()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    trainer = Trainer(kinds)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=12):
        with step as x:
            optimizer.zero_grad()
            model(x, trainer.factors(x, net.scales)).backward()
            optimizer.step()
    finish(job, **{name: scale for name, scale in net.scales.items()})


if __name__ == "__main__":
    main()
