"""State in containers of Python's library, which begins to change after the first steps."""

# ranks: 2
from collections import ChainMap, UserDict, UserList

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Net(nn.ModuleDict):
    def forward(self, x, shift):
        return {name: (layer(x) - shift[name]).square().mean() for name, layer in self.items()}


def main():
    job = relight.init()
    torch.manual_seed(5)
    stats = UserDict(mean=0.0)
    recent = UserList([0.0])
    scopes = ChainMap({"scale": 1.0}, {"shift": 0.1})
    net = Net({name: nn.Linear(3, 2) for name in ("stats", "recent", "scopes")})
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=16):
        with step as x:
            optimizer.zero_grad()
            shift = {
                "stats": stats["mean"],
                "recent": sum(recent),
                "scopes": scopes["scale"],
            }
            losses = model(x, shift)
            sum(losses.values()).backward()
            optimizer.step()
            if step.number > 5:
                value = losses["stats"].item()
                stats["mean"] = 0.9 * stats["mean"] + value
                recent.append(value)
                del recent[:-3]
                scopes["scale"] *= 0.9
    finish(job, **dict(net.items()))


if __name__ == "__main__":
    main()
