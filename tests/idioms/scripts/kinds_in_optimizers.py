"""An optimizer keeps values of every kind in its state, in its groups and in its attributes."""

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


class Keeping(torch.optim.Optimizer):
    def __init__(self, named, kinds, lr):
        self.kinds = {word(name): kind for name, kind in kinds.items()}
        groups = [{"params": [parameter], "kind": name} for name, parameter in named]
        super().__init__(groups, {"lr": lr, "held": None})
        for group in self.param_groups:
            group["held"] = self.kinds[group["kind"]].start()
        self.beside = {name: kind.start() for name, kind in self.kinds.items()}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            kind = self.kinds[group["kind"]]
            for parameter in group["params"]:
                x = parameter.grad.clamp(-3, 3).item()
                state = self.state[parameter]
                if not state:
                    state["held"] = kind.start()
                factor = 1 + 0.01 * (kind.number(state["held"]) + kind.number(group["held"]))
                factor += 0.01 * kind.number(self.beside[group["kind"]])
                parameter -= group["lr"] * factor * parameter.grad
                state["held"] = kind.update(state["held"], x)
                group["held"] = kind.update(group["held"], -x)
                self.beside[group["kind"]] = kind.update(self.beside[group["kind"]], x / 2)


def main():
    job = relight.init()
    torch.manual_seed(3)
    kinds = chosen(leave_out=(*ITERATORS, *OBJECTS, *GENERATORS))
    net = Scales(kinds)
    model = DDP(net)
    optimizer = Keeping(list(net.scales.items()), kinds, 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=12):
        with step as x:
            optimizer.zero_grad()
            model(x, dict.fromkeys(net.scales, 1.0)).backward()
            optimizer.step()
    finish(job, **{name: scale for name, scale in net.scales.items()})


if __name__ == "__main__":
    main()
