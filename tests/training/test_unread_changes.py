"""Changes by code that relight cannot read, of values too large to be copied, or new: undone, carried, or told."""

from pathlib import Path

import pytest

from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import Loop, run_script

SCRIPT = """
import datetime, decimal, io, random, threading
import numpy as np
import torch
from array import array
from collections import Counter, OrderedDict, UserList, deque

class Thing:
    def __init__(self, value=0.0):
        self.value = value

class Slots:
    __slots__ = ("late", "value")

class Counted(Thing):
    count = 0

class Bytes(bytearray): pass
class Numbers(array): pass
class File(io.BytesIO): pass
class Text(io.StringIO): pass
class Rows(np.ndarray): pass
class Local(threading.local): pass
class Chance(random.Random): pass
class Day(datetime.date): pass
class Ring(deque): pass
class Tally(Counter): pass

def nested(depth):
    value = Thing()
    for _ in range(depth):
        value = Thing(value)
    return value

def innermost(value):
    while isinstance(value.value, Thing):
        value = value.value
    return value

def shown(value):
    if isinstance(value, Slots):
        return getattr(value, "late", None)
    if isinstance(value, type):
        return getattr(value, "late", None)
    if isinstance(value, (bytearray, array)):
        return bytes(value), getattr(value, '__dict__', {})
    if isinstance(value, (io.BytesIO, io.StringIO)):
        return value.getvalue(), value.tell()
    if isinstance(value, threading.local):
        return vars(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.ma.MaskedArray):
        return value.data.tobytes(), value.mask.tobytes()
    if isinstance(value, (tuple, set)):
        return [shown(one) for one in value]
    if isinstance(value, Thing):
        return {name: shown(one) for name, one in vars(value).items()}
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return [shown(one) for one in value.unbind()]
        return shown(value.to_dense().float().numpy())
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.tobytes()
    if isinstance(value, (list, deque)):
        return [shown(one) for one in value]
    return [(name, shown(one)) for name, one in value.items()] if isinstance(value, dict) else repr(value)

def filled(count):
    thing = Thing()
    vars(thing).update((f"n{index}", 0.0) for index in range(count))
    return thing

def run():
    large = MAKE
    def act(step):
        CHANGE
    acts = [act]
    CARRY
    for step in steps():
        with step as value:
            if step.number in (FIRST, 30):
                eval("acts[0](1)", {"acts": acts})
            step.end()
    return shown(large), shown(globals().get('large_late'))
result = run()
"""

LARGE = {  # made, changed
    "tensor": ("torch.zeros(2**20 + 8)", "large[3] += 1"),
    "tensor by data": ("torch.zeros(2**20 + 8)", "large.data[3] += 1"),
    "tensors in a list": ("[torch.zeros(2**20) for _ in range(65)]", "large[3].data[3] += 1"),
    "strides": ("torch.zeros(2**11, 2**10).t()", "large.data[3] += 1"),
    "expanded": ("torch.zeros(2**21, 1, 1).expand(-1, 1, 2)", "large.data.select(2, 0)[3] += 1"),
    "bfloat16": ("torch.zeros(2**22, dtype=torch.bfloat16)", "large.data[-1] += 1"),
    "inference": ("torch.inference_mode()(torch.zeros)(2**21)", "large.data.numpy()[3] += 1"),
    "sparse tensor": ("torch.zeros(3).to_sparse().coalesce() + torch.eye(3)[0].to_sparse()", "large.add_(large)"),
    "values of a sparse tensor": ("torch.eye(3).to_sparse().coalesce()", "large.values().data[1] += 1"),
    "nested tensor": ("torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])", "large[1].add_(1)"),
    "array": ("np.zeros(2**19 + 8)", "large[3] += 1"),
    "array of records": ("np.zeros(2**18, dtype=[('a', 'f8'), ('b', 'f8')])", "large['b'][3] += 1"),
    "array of objects": ("np.array([[0.0]] * 6000 + [None], dtype=object)", "large[3][0] += 1"),
    "list": ("[0.0] * 6000", "large[3] += 1"),
    "list of lists": ("[[0.0, i] for i in range(6000)]", "large[5999][0] += 1"),
    "list of objects": ("[Thing() for _ in range(600)]", "large[-1].value += 1"),
    "list of arrays": ("[np.zeros(3) for _ in range(6000)]", "large[-1][0] += 1"),
    "list of numbers of NumPy": ("[np.float64(0)] * 6000", "large[3] = large[3] + 1"),
    "order": ("list(range(6000))", "large.reverse()"),
    "equal numbers": ("[1] * 6000", "large[3] = 1.0"),
    "dict": ("{i: 0.0 for i in range(6000)}", "large[3] += 1"),
    "order of keys": ("OrderedDict((i, 0.0) for i in range(6000))", "large.move_to_end(3)"),
    "dict of dicts": ("{str(i): {'n': 0} for i in range(600)}", "large['3']['n'] += 1"),
    "deque": ("deque(range(6000), maxlen=6000)", "large.append(0)"),
    "set": ("set(range(6000))", "large.discard(3); large.add(-1)"),
    "deep objects": ("nested(15)", "innermost(large).value += 1"),
    "places": ("filled(6000)", "large.n5999 += 1"),
}

MIDDLE = {
    "tensor": ("torch.zeros(2**16)", "large.data[3] += 1"),
    "array": ("np.zeros(2**16)", "large[3] += 1"),
    "list": ("[0.0] * 300", "large[3] += 1"),
    "list of lists": ("[[[[[[0.0]]]]]]", "large[0][0][0][0][0][0] += 1"),
    "deque": ("deque(range(300), maxlen=300)", "large.append(0)"),
    "bytearray": ("bytearray(2**16)", "large[3] += 1"),
    "list of objects": ("[Thing()]", "large.append(Thing(1.0))"),
    "list of objects, one exchanged": ("[Thing(), Thing()]", "large[1] = Thing(2.0)"),
    "list of objects, one removed": ("[Thing(), Thing()]", "del large[1]"),
    "list of objects, order": ("[Thing(), Thing(1.0)]", "large.reverse()"),
    "dict of objects": ("{'a': Thing()}", "large['b'] = Thing(1.0)"),
    "dict of objects, with other keys": ("{('a', 1): Thing()}", "large['a', 1].value += 1"),
    "list in an object": ("Thing([Thing()])", "large.value.append(Thing(1.0))"),
    "deque of objects": ("deque([Thing()])", "large.append(Thing(1.0))"),
    "set of objects": ("{Thing()}", "next(iter(large)).value += 1"),
    "tuple of objects": ("(Thing(), Thing())", "large[1].value += 1"),
    "attribute": ("Thing()", "large.late = 1.0"),
    "attribute over one of its class": ("Counted()", "large.count += 1"),
    "attribute of a class": ("Thing", "large.late = 1.0"),
    "slots": ("Slots()", "large.late = 1.0"),
    "derived bytes": ("Bytes(8)", "large[3] += 1"),
    "derived bytes, longer": ("Bytes(8)", "large.append(1)"),
    "attribute of derived bytes": ("Bytes(8)", "large.late = 1.0"),
    "derived array": ("Numbers('d', [0.0] * 8)", "large[3] += 1"),
    "derived file in memory": ("File()", "large.write(b'1')"),
    "derived text in memory": ("Text()", "large.write('1')"),
    "derived array of NumPy": ("np.zeros(8).view(Rows)", "large[3] += 1"),
    "masked array": ("np.ma.zeros(8)", "large[3] = np.ma.masked"),
    "values of a thread": ("threading.local()", "large.late = 1.0"),
    "derived values of a thread": ("Local()", "large.late = 1.0"),
    "derived stream of numbers": ("Chance(1)", "large.random()"),
    "derived date in an object": ("Thing(Day(2026, 1, 1))", "large.value = Day(2026, 1, 2)"),
    "function in an object": ("Thing(len)", "large.value = max"),
    "derived deque": ("Ring([1], maxlen=3)", "large.append(2)"),
    "derived counter": ("Tally()", "large.update('a')"),
    "global": ("Thing()", "globals()['large_late'] = 1.0"),
    "global of an object": ("Thing()", "globals()['large_late'] = Thing(1.0)"),
}


def script(case: tuple[str, str], first: int, carry: str = "pass") -> str:
    made, change = case
    text = SCRIPT.replace("MAKE", made).replace("CHANGE", change).replace("FIRST", str(first))
    return text.replace("CARRY", carry)


@pytest.mark.parametrize("case", [*LARGE.values(), *MIDDLE.values()], ids=[*LARGE, *MIDDLE])
def test_what_an_undone_step_changed_is_undone_or_told(case: tuple[str, str], tmp_path: Path) -> None:
    whole, loop = Loop(until=4), Loop(until=4, fails_at=1)
    expected = run_script(script(case, 1), whole, tmp_path)
    assert whole.doubt is None
    found = run_script(script(case, 1), loop, tmp_path)
    if found != expected:
        assert "large" in str(loop.doubt)
        assert "too large" in str(loop.doubt)


@pytest.mark.parametrize("case", [*LARGE.values(), *MIDDLE.values()], ids=[*LARGE, *MIDDLE])
def test_a_first_change_after_the_first_steps_is_carried_or_told(case: tuple[str, str], tmp_path: Path) -> None:
    first = Loop(until=8)
    first.risks = []
    expected = run_script(script(case, 5), first, tmp_path)
    second = Loop(until=8, begins_at=6, tree=decode_tree(first.kept[6]))
    if run_script(script(case, 5), second, tmp_path) != expected:
        assert "large" in first.risks[6]
        assert "first time after its first steps" in first.risks[6]


@pytest.mark.parametrize("case", [*LARGE.values(), *MIDDLE.values()], ids=[*LARGE, *MIDDLE])
def test_a_replacement_gets_it_or_that_is_told(case: tuple[str, str], tmp_path: Path) -> None:
    first = Loop(until=4)
    expected = run_script(script(case, 1), first, tmp_path)
    second = Loop(until=4, begins_at=3, tree=decode_tree(first.kept[3]))
    assert run_script(script(case, 1), second, tmp_path) == expected or any("large" in text for text in first.said)


def test_an_object_of_a_library_that_answers_with_errors_is_left_alone(tmp_path: Path) -> None:
    made = "Thing(type('Proxy', (), {'__module__': 'zipfile', '__getattr__': lambda self, name: {}[name]})())"
    loop = Loop(until=4)
    run_script(script((made, "pass"), 1).replace("shown(large), ", ""), loop, tmp_path)
    assert loop.doubt is None


@pytest.mark.parametrize("carry", ["carry('large')", "carry(ignore=('large',))"])
def test_what_the_script_says_of_it_counts(carry: str, tmp_path: Path) -> None:
    loop = Loop(until=4, fails_at=1)
    run_script(script(LARGE["array"], 1, carry), loop, tmp_path)
    assert loop.doubt is None


def test_a_file_that_is_mapped_is_not_read(tmp_path: Path) -> None:
    """Data in files may be larger than memory; a change of it is state in a file."""
    made = "torch.from_numpy(np.memmap(PATH, 'u1', 'w+', shape=2**23))".replace("PATH", repr(str(tmp_path / "data")))
    loop = Loop(until=4, fails_at=1)
    run_script(script((made, "large.data[3] += 1"), 1), loop, tmp_path)
    assert loop.doubt is None


def test_what_is_not_compared_is_said(tmp_path: Path) -> None:
    loop = Loop(until=4)
    run_script(script(("[Thing() for _ in range(2**16)]", "pass"), 1), loop, tmp_path)
    assert [text for text in loop.said if "too many" in text]


def test_what_python_notes_on_a_class_is_no_change(tmp_path: Path) -> None:
    """The names of slots, when the first object of a class is copied or pickled."""
    loop = Loop(until=8)
    loop.risks = []
    source = script(("Thing()", "copy.deepcopy(large)"), 5).replace("import datetime", "import copy, datetime")
    run_script(source, loop, tmp_path)
    assert not any(loop.risks)


DECORATED = """
import functools

def counted(function):
    def inner(*given):
        inner.calls += 1
        return function(*given)
    inner.calls = 0
    return inner

class Thing:
    @DECORATORcounted
    def METHOD(*given):
        return 1

def run():
    thing = Thing()
    for step in steps():
        with step as value:
            eval("CALL", {"thing": thing})
            step.end()
    found = vars(Thing)["METHOD"]
    for name in ("__func__", "fget", "func"):
        found = getattr(found, name, found)
    return found.calls
result = run()
"""


@pytest.mark.parametrize(
    ("decorator", "method", "call"),
    [
        ("", "__call__", "thing()"),
        ("", "__getitem__", "thing[1]"),
        ("staticmethod\n    @", "act", "thing.act()"),
        ("classmethod\n    @", "act", "thing.act()"),
        ("property\n    @", "act", "thing.act"),
        ("functools.cached_property\n    @", "act", "vars(thing).pop('act', 1), thing.act"),
    ],
)
def test_what_a_decorator_of_a_method_counts_is_carried(decorator: str, method: str, call: str, tmp_path: Path) -> None:
    source = DECORATED.replace("DECORATOR", decorator).replace("METHOD", method).replace("CALL", call)
    first, undone = Loop(), Loop(fails_at=2)
    assert run_script(source, first, tmp_path) == 6
    assert run_script(source, undone, tmp_path) == 6
    assert run_script(source, Loop(begins_at=4, tree=decode_tree(first.kept[4])), tmp_path) == 6


OF_OPTIMIZERS = """
import torch

class Counting(torch.optim.SGD):
    def __init__(self, given):
        super().__init__(given, lr=0.1)
        self.count, self.sums = 0, {}
    def step(self):
        self.count += 1
        self.sums[self.count % 3] = self.sums.get(self.count % 3, 0) + self.count
        super().step()

class Several:
    def __init__(self, **optimizers):
        self.optimizers = optimizers
    def __getattr__(self, name):
        return self.__dict__["optimizers"][name]

def run():
    net = torch.nn.Linear(1, 1)
    several = Several(counting=Counting(net.parameters()))
    steps.hand_over(net, several.counting)
    for step in steps():
        with step as value:
            several.counting.step()
            step.end()
    return several.counting.count, several.counting.sums
result = run()
"""


def test_attributes_of_an_optimizer_that_code_reaches_unseen_are_carried(tmp_path: Path) -> None:
    first = Loop()
    whole = run_script(OF_OPTIMIZERS, first, tmp_path)
    assert whole[0] == 6
    assert run_script(OF_OPTIMIZERS, Loop(fails_at=2), tmp_path) == whole
    assert run_script(OF_OPTIMIZERS, Loop(begins_at=4, tree=decode_tree(first.kept[4])), tmp_path) == whole


BESIDE_PARTS = """
import torch

class Meter:
    def __init__(self):
        self.count = 0
    def see(self):
        self.count += 1
        return self.count

class Shared:
    kept = {}
    def __init__(self):
        self.__dict__ = self.kept

def run():
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    steps.hand_over(net, optimizer)
    shared = Shared()
    shared.net, shared.optimizer, shared.meter, shared.total = net, optimizer, Meter(), 0
    shared.inner = {'net': net, 'meter': Meter()}
    for step in steps():
        with step as value:
            Shared().total += Shared().meter.see() + Shared().inner['meter'].see()
            step.end()
    return Shared().total, Shared().meter.count, Shared().inner['meter'].count
result = run()
"""


def test_what_a_container_has_beside_what_was_handed_over_is_carried(tmp_path: Path) -> None:
    first = Loop()
    whole = run_script(BESIDE_PARTS, first, tmp_path)
    assert whole == (42, 6, 6)
    assert run_script(BESIDE_PARTS, Loop(fails_at=2), tmp_path) == whole
    assert run_script(BESIDE_PARTS, Loop(begins_at=4, tree=decode_tree(first.kept[4])), tmp_path) == whole


ANSWERS = """
class Kind(type):
    kept = {"count": 0}
    def __getattr__(cls, name):
        return cls.kept[name]
    def __setattr__(cls, name, value):
        cls.kept[name] = value

class Settings(metaclass=Kind):
    pass

def run():
    for step in steps():
        with step as value:
            if step.number > 1:
                Settings.last = Settings.last + value if step.number > 2 else value
            Settings.count += 1
            step.end()
    return Settings.count, Settings.last
result = run()
"""


def test_a_class_that_answers_with_other_errors_is_read(tmp_path: Path) -> None:
    first = Loop()
    whole = run_script(ANSWERS, first, tmp_path)
    assert whole == (6, 18.0)
    assert run_script(ANSWERS, Loop(fails_at=2), tmp_path) == whole
    assert run_script(ANSWERS, Loop(begins_at=4, tree=decode_tree(first.kept[4])), tmp_path) == whole


IN_CONTAINER = """
import collections, torch

class Meter:
    def __init__(self):
        self.count = 0
    def see(self):
        self.count += 1

Named = collections.namedtuple("Named", "net meter numbers")

class Holder:
    pass

def run():
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    steps.hand_over(net, optimizer)
    holder = Holder()
    meter, numbers = Meter(), [0]
    w = MAKE
    del meter, numbers
    for step in steps():
        with step as value:
            eval("CHANGE", {"w": w, "holder": holder, "net": net, "n": step.number})
            step.end()
    return SHOWN
result = run()
"""
SHAPES_OF_CONTAINERS = {
    "tuple": ("(net, meter, numbers)", "w[1].see(), w[2].append(n)", "w[1].count, w[2]"),
    "list": ("[net, meter, numbers]", "w[1].see(), w[2].append(n)", "w[1].count, w[2]"),
    "deque": ("collections.deque([net, meter, numbers])", "w[1].see(), w[2].append(n)", "w[1].count, w[2]"),
    "nested": ("[net, ({'a': optimizer, 'b': [meter, numbers]},)]", "w[1][0]['b'][0].see()", "w[1][0]['b'][0].count"),
    "named": ("Named(net, meter, numbers)", "w.meter.see(), w.numbers.append(n)", "w.meter.count, w.numbers"),
    "number of a list": ("[net, 0, meter]", "w.__setitem__(1, w[1] + n), w[2].see()", "w[1], w[2].count"),
    "parts alone": ("[net]", "w.append(net.weight)", "[type(one).__name__ for one in w]"),
    "another one each time": ("None", "setattr(holder, 'pair', (net, n))", "holder.pair[1], type(holder.pair[0])"),
    "another one now and then": (
        "setattr(holder, 'pair', (net, 0))",
        "n % 3 or setattr(holder, 'pair', (net, n))",
        "holder.pair[1], holder.pair[0] is net",
    ),
}


@pytest.mark.parametrize("shape", SHAPES_OF_CONTAINERS)
def test_what_code_changes_unseen_beside_what_was_handed_over_is_carried(shape: str, tmp_path: Path) -> None:
    make, change, shown = SHAPES_OF_CONTAINERS[shape]
    source = IN_CONTAINER.replace("MAKE", make).replace("CHANGE", change).replace("SHOWN", shown)
    first = Loop()
    whole = run_script(source, first, tmp_path)
    assert run_script(source, Loop(fails_at=2), tmp_path) == whole
    assert run_script(source, Loop(begins_at=4, tree=decode_tree(first.kept[4])), tmp_path) == whole
