"""State in places that people rarely think of: function attributes, context variables, thread locals, slots, partials."""

import bisect
import contextvars
import functools
import heapq
import threading
import types
from collections import Counter, UserDict, defaultdict

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish

current = contextvars.ContextVar("current", default=0.0)
local = threading.local()
local.total = 0.0
config = types.SimpleNamespace(gain=1.0)


def smooth(value):
    smooth.calls += 1
    smooth.mean = 0.9 * smooth.mean + 0.1 * value
    return smooth.mean


smooth.calls, smooth.mean = 0, 1.0


class Slotted:
    __slots__ = ("count", "_gain")

    def __init__(self):
        self.count, self._gain = 0, 1.0

    @property
    def gain(self):
        return self._gain

    @gain.setter
    def gain(self, value):
        self.count += 1
        self._gain = value


class Book(UserDict):
    def note(self, key, value):
        self[key] = 0.5 * self.get(key, 0.0) + value


def scaled(loss, history):
    history.append(float(loss))
    return sum(history[-3:]) / 3


def main():
    job = relight.init()
    torch.manual_seed(71 + job.rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    slotted, book, worst, ordered = Slotted(), Book(), [], []
    seen, by_class = Counter(), defaultdict(list)
    window = functools.partial(scaled, history=[])
    data = bytearray(4)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(5, 6), torch.randint(0, 3, (5,)))
    )
    for step in training.steps(until=16):
        with step as (x, y):
            loss = F.cross_entropy(model(x), y)
            value = loss.item()
            current.set(current.get() + value)
            local.total += value
            config.gain *= 0.99
            slotted.gain = 0.8 * slotted.gain + 0.2 * value
            book.note(int(y[0]), value)
            seen.update(y.tolist())
            by_class[int(y[1])].append(value)
            heapq.heappush(worst, (-value, step.number))
            if len(worst) > 4:
                heapq.heappop(worst)
            bisect.insort(ordered, value)
            data[step.number % 4] = (data[step.number % 4] + int(y.sum())) % 256
            factor = (
                smooth(value)
                + window(value)
                + current.get() / (step.number + 1)
                + local.total
                + slotted.gain
                + sum(book.values())
                + seen.most_common(1)[0][1]
                + sum(sum(a) for a in by_class.values())
                + worst[0][0]
                + ordered[len(ordered) // 2]
                + sum(data) / 100
            )
            optimizer.zero_grad()
            (loss * config.gain / (1 + abs(factor))).backward()
            optimizer.step()
    finish(
        job, model=model, optimizer=optimizer, calls=[smooth.calls, slotted.count], data=bytes(data), total=local.total
    )


if __name__ == "__main__":
    main()
