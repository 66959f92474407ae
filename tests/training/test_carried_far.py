"""State that is hard to see: many objects deep, behind bound methods, in classes over containers, beside locks."""

from pathlib import Path

import pytest

from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import STEPS, Loop, run_script

WRAPPERS = """
class Env:
    def __init__(self):
        self.state = 1
    def step(self, b):
        self.state = (3 * self.state + b) % 97
        return self.state
class Wrapper:
    def __init__(self, env):
        self.env = env
    def __getattr__(self, name):
        return getattr(self.env, name)
class Vector:
    def __init__(self, envs):
        self.envs = envs
    def step(self, b):
        return sum(env.step(b) for env in self.envs)
envs = Vector([Wrapper(Wrapper(Wrapper(Wrapper(Env())))) for _ in range(2)])
total = 0
for step in steps():
    with step as b:
        total = (total + envs.step(b)) % 89
        step.end()
result = total, [env.state for env in envs.envs]
"""
HANDLERS = """
import weakref
from collections import defaultdict
class Mean:
    def __init__(self):
        self.value = 0.0
    def update(self, b):
        self.value = 0.5 * self.value + b
handlers, scale = defaultdict(list), 0.0
means = (Mean(), Mean())
handlers['loss'].append((means[0].update, (weakref.ref(means[1]), 1), {}))
def fire(name, b):
    for function, first, named in handlers[name]:
        function(b, **named)
        first[0]().update(b)
keep = [means[1]]
del means
def current():
    return [handlers['loss'][0][0].__self__.value, handlers['loss'][0][1][0]().value]
for step in steps():
    with step as b:
        getattr(__import__('operator'), 'call')(fire, 'loss', b)
        scale = 0.9 * scale + sum(current())
        step.end()
result = scale, current()
"""
WRAPPED_HANDLERS = """
import functools, weakref
from collections import defaultdict
class Best:
    def __init__(self):
        self.score, self.bad = None, 0
    def __call__(self, b):
        if self.score is None or b > self.score:
            self.score, self.bad = b, 0
        else:
            self.bad += 1
class Engine:
    def __init__(self):
        self.handlers = defaultdict(list)
    def on(self, event, function):
        @functools.wraps(function)
        def filtered(b):
            filtered.calls += 1
            return function(b)
        filtered.calls = 0
        self.handlers[event].append((filtered, (weakref.ref(self),)))
    def fire(self, event, b):
        for function, (owner,) in self.handlers[event]:
            assert owner() is self
            function(b)
engine, best, total = Engine(), Best(), 0.0
engine.on('loss', best)
del best
def heard():
    return engine.handlers['loss'][0][0]
for step in steps():
    with step as b:
        engine.fire('begin', b)
        engine.fire('loss', b)
        engine.fire('end', b)
        total = 0.9 * total + heard().calls + heard().__wrapped__.bad
        step.end()
result = total, heard().calls, vars(heard().__wrapped__)
"""
FIXED = """
import threading, weakref
class Smoothed:
    def __set_name__(self, owner, name):
        self.key = '_' + name
    def __get__(self, instance, owner=None):
        return getattr(instance, self.key, 1.0)
    def __set__(self, instance, value):
        setattr(instance, self.key, 0.5 * getattr(instance, self.key, 1.0) + value)
class Trainer:
    loss = Smoothed()
    def __init__(self):
        self.lock, self.scale = threading.Lock(), lambda x: 2 * x
        self.receivers = [weakref.WeakMethod(self.listen), self.listen]
        self.heard = []
    def listen(self, x):
        self.heard.append(x)
    def train(self, b):
        self.loss = b
        with self.lock:
            self.receivers[0]()(self.scale(self.loss))
        return self.heard[-1] + len(self.heard)
trainer, total = Trainer(), 0.0
for step in steps():
    with step as b:
        total += trainer.train(b)
        step.end()
result = total, trainer.loss, trainer.heard
"""
OWN_STEP = """
import torch
class Counting(torch.optim.SGD):
    _seen = None
    @torch.no_grad()
    def step(self, closure=None):
        if self._seen is None:
            self._seen = torch.zeros(1)
            self._calls = 0
        self._calls += 1
        self._seen.add_(self._calls)
net = torch.nn.Linear(1, 1)
opt = Counting(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(opt)
hand_over(net, opt)
total = 0.0
for step in steps():
    with step as b:
        opt.step()
        total += float(opt._seen) * b
        step.end()
result = total, opt._calls
"""
OBJECTS = """
import numpy as np
class Tree:
    def __init__(self):
        self.at, self.data = 0, np.empty(3, object)
    def add(self, b):
        self.data[self.at] = (b, [b])
        self.at = (self.at + 1) % 3
tree, total = Tree(), 0.0
for step in steps():
    with step as b:
        tree.add(b)
        total += sum(one[0] + len(one[1]) for one in tree.data if one is not None)
        tree.data[0][1].append(b)
        step.end()
result = total, [repr(one) for one in tree.data]
"""
RECORDS = """
import numpy as np
rows = np.zeros(4, np.dtype([('time', np.int32), ('state', np.float32, (2,))]))
name, total = np.str_('x'), 0.0
for step in steps():
    with step as b:
        rows[step.number % 4] = (step.number, (b, total))
        total = float(rows['state'].sum()) % 31 + len(name)
        name = np.str_(name[-2:] + 'y')
        step.end()
result = total, repr(rows), name
"""
SUBCLASSES = """
from collections import OrderedDict, deque
from functools import partial
class AttrDict(dict):
    __getattr__ = dict.get
    __setattr__ = dict.__setitem__
class History(list):
    def __getitem__(self, at):
        return list.__getitem__(self, at)['v'] if isinstance(at, int) else list.__getitem__(self, at)
class Cache(OrderedDict):
    def __init__(self, size):
        super().__init__()
        self.size = size
    def __getitem__(self, key):
        self.move_to_end(key)
        return super().__getitem__(key)
    def put(self, key, value):
        self[key] = value
        self.size = 5 - self.size
        while len(self) > self.size:
            self.popitem(last=False)
class Window(deque):
    pass
def push(buffer, value):
    buffer.append(value)
    return sum(buffer)
state, history, cache, window, pushed = AttrDict(n=0), History(), Cache(3), Window(maxlen=3), partial(push, [])
total = 0.0
for step in steps():
    with step as b:
        state.n += 1
        history.append({'v': b})
        cache.put(int(b) % 4, b)
        window.append(b)
        total = 0.9 * total + state.n * history[-1] + sum(cache.values()) + cache[next(iter(cache))]
        total += sum(window) + sum(map(lambda f: f(b), [pushed]))
        step.point(5, total)
        step.end()
result = total, dict(state), list(history), list(cache.items()), cache.size, list(window), type(cache).__name__
"""
FACTORIES = """
from collections import defaultdict, deque
class Meter:
    def __init__(self):
        self.total = 0.0
class Meters:
    def __init__(self):
        self.reset()
    def reset(self):
        self.last, self.sums = defaultdict(lambda: deque(maxlen=3)), defaultdict(Meter)
    def add(self, key, value):
        self.last[key].append(value)
        self.sums[key].total += value
        return sum(map(sum, self.last.values())) + sum(one.total for one in self.sums.values())
meters, total = Meters(), 0.0
for step in steps():
    with step as b:
        if step.number % 3 == 2:
            meters.reset()
        total += meters.add(f'k{step.number}', b)
        step.point(5, total)
        step.end()
result = total
"""
CROWD = """
class Particle:
    def __init__(self, at):
        self.at = self.best = at
particles, total = [Particle(i) for i in range(100)], 0.0
def move(one, b):
    one.at = (3 * one.at + b) % 17
    one.best = max(one.best, one.at)
for step in steps():
    with step as b:
        list(map(lambda one: move(one, b), particles))
        total += sum(one.best for one in particles)
        step.point(5, total)
        step.end()
result = total, [one.at for one in particles]
"""
PACKED = """
import numpy as np
import torch
from array import array
counts, bits = array('d', [0.0] * 4), np.random.PCG64(4)
rows = np.zeros(3, [('x', float), ('n', int)]).view(np.recarray)
points, total = torch.quasirandom.SobolEngine(2, scramble=True, seed=1), 0.0
for step in steps():
    with step as b:
        counts[step.number % 4] += b
        rows.x[step.number % 3] += b
        total += sum(counts) + bits.random_raw() % 1000 + float(rows.x.sum()) + float(points.draw(2).sum())
        step.point(5, total)
        step.end()
result = total, list(counts), repr(rows), points.num_generated
"""
SCRIPTS = {
    "subclasses of containers": SUBCLASSES,
    "factories": FACTORIES,
    "a crowd": CROWD,
    "packed": PACKED,
    "wrappers": WRAPPERS,
    "handlers": HANDLERS,
    "wrapped_handlers": WRAPPED_HANDLERS,
    "fixed": FIXED,
    "an optimizer's own step": OWN_STEP,
    "objects": OBJECTS,
    "records": RECORDS,
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_it_is_undone_and_goes_on_in_a_replacement(text: str, tmp_path: Path) -> None:
    first = Loop()
    expected = run_script(text, first, tmp_path)
    for number in range(STEPS):
        assert run_script(text, Loop(fails_at=number), tmp_path) == expected, number
    for version in range(1, STEPS + 1):
        again = Loop(begins_at=version, tree=decode_tree(first.kept[version]))
        again.noticed = first.carried.noticed()
        assert run_script(text, again, tmp_path) == expected, version
        assert not again.doubt
