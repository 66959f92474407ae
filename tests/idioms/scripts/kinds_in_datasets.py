"""A dataset, its sampler and its collate function keep values of every kind between items."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

import relight
from tests.idioms.digest import finish
from tests.idioms.kinds import ITERATORS, OBJECTS, chosen, word


class Scales(nn.Module):
    """One number for each kind."""

    def __init__(self, kinds):
        super().__init__()
        self.scales = nn.ParameterDict({word(kind): nn.Parameter(torch.ones(())) for kind in kinds})

    def forward(self, x, factors):
        return sum((x * scale * factors[kind] - 1).square().mean() for kind, scale in self.scales.items())


class Items(Dataset):
    def __init__(self, kinds):
        self.kinds = kinds
        self.held = {name: kind.start() for name, kind in kinds.items()}
        self.x = torch.linspace(-2, 2, 96).reshape(32, 3)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = self.x[index]
        factors = {}
        for name, kind in self.kinds.items():
            factors[word(name)] = 1 + 0.01 * kind.number(self.held[name])
            self.held[name] = kind.update(self.held[name], x.mean().item())
        return x, factors


class Order(Sampler):
    def __init__(self, kinds):
        self.kinds = kinds
        self.held = {name: kind.start() for name, kind in kinds.items()}

    def __len__(self):
        return 32

    def __iter__(self):
        for number in range(32):
            shift = 0
            for name, kind in self.kinds.items():
                shift += int(kind.number(self.held[name]) * 100)
                self.held[name] = kind.update(self.held[name], number % 5 - 2)
            yield (number + shift) % 32


class Collate:
    def __init__(self, kinds):
        self.kinds = kinds
        self.held = {name: kind.start() for name, kind in kinds.items()}

    def __call__(self, items):
        x, factors = default_collate(items)
        for name, kind in self.kinds.items():
            x = x * (1 + 0.001 * kind.number(self.held[name]))
            self.held[name] = kind.update(self.held[name], x.mean().clamp(-3, 3).item())
        return x, {name: values.float().mean() for name, values in factors.items()}


def main():
    job = relight.init()
    torch.manual_seed(3)
    kinds = chosen(leave_out=(*ITERATORS, *OBJECTS))
    net = Scales(kinds)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    loader = DataLoader(Items(kinds), 4, sampler=Order(kinds), collate_fn=Collate(kinds))
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for step in training.steps(until=12):
        with step as (x, factors):
            optimizer.zero_grad()
            model(x, factors).backward()
            optimizer.step()
    finish(job, **{name: scale for name, scale in net.scales.items()})


if __name__ == "__main__":
    main()
