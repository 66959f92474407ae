"""Flags several at once and none, a linked list of slots, a set of attributes that count their writes, one-line turns."""

# ranks: 2
# fmt: off
import dataclasses
import enum
import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Mode(enum.Flag):
    NOISE = enum.auto()
    CLIP = enum.auto()


@dataclass(slots=True, order=True)
class Item:
    priority: float
    name: str = field(compare=False)


@dataclass(frozen=True)
class Phase:
    number: int = 0
    last: tuple = ()


class Node:
    __slots__ = ("next", "previous", "value")

    def __init__(self, value):
        self.value, self.next, self.previous = value, None, None


class Recent:
    def __init__(self, most):
        self.most, self.nodes = most, {}
        self.head, self.tail = Node(None), Node(None)
        self.head.next, self.tail.previous = self.tail, self.head

    def touch(self, key):
        node = self.nodes.pop(key, None) or Node(key)
        if node.previous:
            node.previous.next, node.next.previous = node.next, node.previous
        node.next, node.previous = self.head.next, self.head
        self.head.next.previous = self.head.next = node
        self.nodes[key] = node
        if len(self.nodes) > self.most:
            oldest = self.tail.previous
            oldest.previous.next, self.tail.previous = self.tail, oldest.previous
            del self.nodes[oldest.value]

    def keys(self):
        node = self.head.next
        while node is not self.tail: yield node.value; node = node.next  # noqa: E701, E702


class Counted:
    def __init__(self):
        object.__setattr__(self, "writes", 0)
        self.scale = 1.0

    def __setattr__(self, name, value):
        object.__setattr__(self, "writes", self.writes + 1)
        object.__setattr__(self, name, value)

    @functools.cached_property
    def table(self):
        return [self.scale * i for i in range(4)]


job = relight.init()
torch.manual_seed(3)
net = DDP(nn.Linear(5, 3))
opt = torch.optim.SGD(net.parameters(), 0.1)
mode, phase, recent, counted = Mode.NOISE, Phase(), Recent(3), Counted()
items = [Item(float(i), f"i{i}") for i in range(5)]


def choose(step):
    global mode, phase
    mode = Mode(0) if step.number % 5 == 4 else mode ^ Mode.CLIP
    phase = dataclasses.replace(phase, number=phase.number + 1, last=(*phase.last[-2:], len(items)))
    items.sort()
    items[0].priority += 1.7
    recent.touch(items[0].name)
    counted.__dict__.pop("table", None)
    counted.scale *= 0.97


def train(step):
    with step as x:
        choose(step)
        factor = (1 + phase.number / 50) * (1 + len(list(recent.keys())) / 10) * (1 + sum(counted.table) / 20)
        loss = F.cross_entropy(net(x) * factor, x[:, :3].argmax(1))
        opt.zero_grad()
        loss.backward()
        if mode & Mode.CLIP: nn.utils.clip_grad_norm_(net.parameters(), 0.1)  # noqa: E701
        opt.param_groups[0]["lr"] = 0.1 * counted.scale * (0.5 if not mode else 1.0)
        opt.step()


training = relight.Training(model=net, optimizer=opt, data=lambda n: torch.randn(6, 5))
for step in training.steps(until=14): train(step)  # noqa: E701
finish(job, net=net, opt=opt, mode=mode.value, phase=dataclasses.astuple(phase), recent=list(recent.keys()),
       writes=counted.writes, items=[(item.priority, item.name) for item in items])
