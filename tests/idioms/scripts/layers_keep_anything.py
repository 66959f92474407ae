"""Layers assign values of many kinds to their attributes in each forward, and read them in the next."""

# ranks: 2
import collections
import copy
import dataclasses
import datetime
import enum
import fractions
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Pair(NamedTuple):
    a: object
    b: float


class Mode(enum.Enum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class State:
    h: torch.Tensor
    n: int = 0


class Slots:
    __slots__ = ("v",)

    def __init__(self, v):
        self.v = v


RULES = {
    "complex": (1 + 1j, lambda v, x: v * 0.9 + complex(x, -x), lambda v: v.real + v.imag),
    "dataclass": (State(torch.ones(2)), lambda v, x: State(v.h * 0.9 + x, v.n + 1), lambda v: v.h.sum().item() + v.n),
    "named": (Pair(1.0, 2.0), lambda v, x: Pair(v.b * 0.5, v.a + x), lambda v: v.a + v.b),
    "named tensors": (
        Pair(torch.ones(2), 1),
        lambda v, x: Pair(v.a * 0.9 + x, v.b + 1),
        lambda v: v.a.sum().item() + v.b,
    ),
    "enum": (Mode.LOW, lambda v, x: Mode.HIGH if (v is Mode.LOW) == (x > 0) else Mode.LOW, lambda v: v.value),
    "leaf": (
        torch.ones(2, requires_grad=True),
        lambda v, x: (v.detach() * 0.9 + x).requires_grad_(),
        lambda v: v.sum().item(),
    ),
    "list of objects": ([Slots(1.0)], lambda v, x: [*v[-2:], Slots(v[-1].v * 0.9 + x)], lambda v: sum(s.v for s in v)),
    "deque of objects": (
        collections.deque([State(torch.ones(1))], 3),
        lambda v, x: collections.deque([*v, State(v[-1].h * 0.9 + x)], 3),
        lambda v: sum(s.h.item() for s in v),
    ),
    "frozen set": (frozenset({1}), lambda v, x: frozenset({*v, int(abs(x) * 1000) % 7}), lambda v: sum(v)),
    "date": (
        datetime.date(2024, 1, 1),
        lambda v, x: v + datetime.timedelta(days=1 + int(abs(x) * 100) % 5),
        lambda v: v.toordinal() % 9,
    ),
    "fraction": (
        fractions.Fraction(1, 2),
        lambda v, x: (v + fractions.Fraction(1, 3 + int(abs(x) * 100) % 5)) % 2,
        float,
    ),
    "counter": (
        collections.Counter(a=1),
        lambda v, x: v + collections.Counter(a=1 + int(abs(x) * 10) % 3),
        lambda v: v["a"] % 11,
    ),
    "ordered": (
        collections.OrderedDict(a=1.0),
        lambda v, x: collections.OrderedDict(a=v["a"] * 0.9 + x),
        lambda v: v["a"],
    ),
    "bytes": (
        bytearray(b"a"),
        lambda v, x: bytearray(v[-3:] + bytes([int(abs(x) * 100) % 250])),
        lambda v: sum(v) % 13,
    ),
    "size": (torch.Size([2]), lambda v, x: torch.Size([1 + (v[0] + int(abs(x) * 100)) % 5]), lambda v: v[0]),
    "slots": (Slots(1.0), lambda v, x: Slots(v.v * 0.9 + x), lambda v: v.v),
    "dict of objects": ({"a": Slots(1.0)}, lambda v, x: {"a": Slots(v["a"].v * 0.9 + x)}, lambda v: v["a"].v),
    "range": (range(3), lambda v, x: range((v.start + 1 + int(abs(x) * 100)) % 5, 9), lambda v: v.start),
    "generator": (
        torch.Generator().manual_seed(1),
        lambda v, x: torch.Generator().manual_seed(v.initial_seed() + 1 + int(abs(x) * 100) % 5),
        lambda v: v.initial_seed() % 7,
    ),
    "tuple of tensors": ((torch.ones(1), torch.ones(1)), lambda v, x: (v[1], v[0] * 0.9 + x), lambda v: v[0].item()),
    "dtype": (
        torch.float32,
        lambda v, x: torch.float64 if (v is torch.float32) == (x > 0) else torch.float32,
        lambda v: v.itemsize,
    ),
}


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.kind = kind
        self.held = copy.deepcopy(RULES[kind][0]) if kind != "generator" else RULES[kind][0]

    def forward(self, x):
        _, update, number = RULES[self.kind]
        out = x * self.scale * (1 + 0.01 * number(self.held))
        self.held = update(self.held, out.detach().mean().clamp(-3, 3).item())
        return out


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def main():
    job = relight.init()
    torch.manual_seed(33)
    kinds = list(RULES)
    layers = nn.ModuleList([Layer(kind) for kind in kinds])
    model = DDP(Net(layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            sum((out - 1).square().mean() for out in model(x)).backward()
            optimizer.step()
    finish(job, **{kind.replace(" ", "_"): layer.scale for kind, layer in zip(kinds, layers, strict=True)})


if __name__ == "__main__":
    main()
