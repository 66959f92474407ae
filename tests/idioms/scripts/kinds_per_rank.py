"""Objects whose state differs by rank, with values of every kind in their `state_dict`."""

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


class Kept:
    def __init__(self, kind):
        self.kind = kind
        self.held = kind.start()

    def see(self, x):
        self.held = self.kind.update(self.held, x)

    @property
    def factor(self):
        return 1 + 0.01 * self.kind.number(self.held)

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        self.held = state["held"]


def main():
    job = relight.init()
    torch.manual_seed(3)
    kinds = chosen(leave_out=(*ITERATORS, *OBJECTS, *GENERATORS))
    net = Scales(kinds)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    kept = {word(name): Kept(kind) for name, kind in kinds.items()}
    training = relight.Training(model=model, optimizer=optimizer, per_rank=kept, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=12):
        with step as x:
            for one in kept.values():
                one.see(x.mean().clamp(-3, 3).item())
            optimizer.zero_grad()
            model(x, {name: one.factor for name, one in kept.items()}).backward()
            optimizer.step()
    finish(job, **{name: [net.scales[name], one.factor] for name, one in kept.items()})


if __name__ == "__main__":
    main()
