"""State in a dict whose keys are attributes (a class of the script's own over dict), and in a class over list."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AttrDict(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self[name] = value


class Window(list):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def push(self, value):
        self.append(value)
        del self[: -self.size]

    def mean(self):
        return sum(self) / len(self)


def main():
    job = relight.init()
    torch.manual_seed(47)
    model = DDP(nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 4))
    stats = AttrDict(ema=0.0, count=0)
    window = Window(4)
    for step in training.steps(until=14):
        with step as x:
            loss = (model(x) - x.max(1, keepdim=True).values).square().mean()
            optimizer.zero_grad()
            loss.backward()
            stats.ema = 0.9 * stats.ema + 0.1 * loss.item()
            stats.count += 1
            window.push(loss.item())
            scale = torch.tensor(stats.ema / (1 - 0.9**stats.count) + window.mean())
            torch.distributed.all_reduce(scale)
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / (1 + scale.item())
            optimizer.step()
    finish(job, model=model, ema=stats.ema, count=stats.count, window=list(window))


if __name__ == "__main__":
    main()
