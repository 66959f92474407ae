"""Everything in nested functions: counters by nonlocal, function attributes, a cache by lru_cache, a default argument."""

# ranks: 2
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def make_training(job):
    torch.manual_seed(31)
    net = DDP(nn.Sequential(nn.Linear(4, 9), nn.ELU(), nn.Linear(9, 2)))
    optimizer = torch.optim.Adagrad(net.parameters(), 0.1)
    calls, ema_loss, history = 0, None, []

    @functools.lru_cache(maxsize=None)
    def weight_at(number):
        return 1.0 / (1 + number)

    def smooth(value, memory={}):
        memory["value"] = 0.8 * memory.get("value", value) + 0.2 * value
        return memory["value"]

    def train_step(x):
        nonlocal calls, ema_loss
        calls += 1
        train_step.total = getattr(train_step, "total", 0.0) + float(x.sum())
        loss = (net(x) - x[:, :2]).abs().mean() * weight_at(calls % 5)
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        ema_loss = mean.item() if ema_loss is None else 0.9 * ema_loss + 0.1 * mean.item()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + smooth(ema_loss))
        history.append(round(train_step.total, 6))
        optimizer.step()

    def result():
        return {"net": net, "optimizer": optimizer, "calls": calls, "ema": ema_loss, "history": history}

    return net, optimizer, train_step, result


def main():
    job = relight.init()
    net, optimizer, train_step, result = make_training(job)
    training = relight.Training(model=net, optimizer=optimizer, data=lambda n: torch.randn(6, 4))
    for step in training.steps(until=15):
        with step as x:
            train_step(x)
    finish(job, **result())


if __name__ == "__main__":
    main()
