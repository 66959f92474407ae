"""A scheduler of the script keeps values of every kind."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish
from tests.idioms.kinds import GENERATORS, ITERATORS, KINDS, OBJECTS, chosen, word


class Scales(nn.Module):
    """One number for each kind."""

    def __init__(self, kinds):
        super().__init__()
        self.scales = nn.ParameterDict({word(kind): nn.Parameter(torch.ones(())) for kind in kinds})

    def forward(self, x, factors):
        return sum((x * scale * factors[kind] - 1).square().mean() for kind, scale in self.scales.items())


class Keeping(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, kinds):
        self.kinds = kinds
        self.held = {name: kind.start() for name, kind in kinds.items()}
        super().__init__(optimizer)

    def get_lr(self):
        lrs = []
        for group, (name, kind) in zip(self.optimizer.param_groups, self.kinds.items(), strict=True):
            lrs.append(0.02 * (1 + 0.01 * kind.number(self.held[name])))
            self.held[name] = kind.update(self.held[name], (self.last_epoch * 7 % 5 - 2) / 3)
        return lrs

    def state_dict(self):
        return {key: value for key, value in self.__dict__.items() if key not in ("optimizer", "kinds")}


def main():
    job = relight.init()
    torch.manual_seed(3)
    kinds = chosen(leave_out=(*ITERATORS, *OBJECTS, *GENERATORS))
    net = Scales(kinds)
    model = DDP(net)
    optimizer = torch.optim.SGD([{"params": [scale]} for scale in net.scales.values()], 0.02)
    scheduler = Keeping(optimizer, kinds)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=12):
        with step as x:
            optimizer.zero_grad()
            model(x, dict.fromkeys(net.scales, 1.0)).backward()
            optimizer.step()
            scheduler.step()
    finish(job, **{name: scale for name, scale in net.scales.items()})


if __name__ == "__main__":
    main()
