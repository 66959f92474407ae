"""Scripts composed at random of ways in which Python code holds state from step to step.

Each is run undisturbed, with a step that is interrupted at a random place and repeated, and with a replacement that
goes on at a random version. All must end alike, or the script is refused, or the replacement's bits are doubted:

    python -m tests.training.carried_scripts --seeds 0..10000
"""

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from relight.errors import UsageError
from relight.transfer.codec import decode_tree
from tests.training.carried_loop import STEPS, Loop, run_script


@dataclass(frozen=True)
class Holder:
    """One way to hold a number. `{i}` is its number in the script, `{v}` what is added."""

    begin: str  # in the function that holds the loop, before it
    read: str  # an expression
    update: str
    module: str = ""  # at the head of the module
    result: str = ""  # all of the state; `read` if that is all
    needs_function: bool = False  # the loop may not be at the module's level


_CELL = "class Cell{i}:\n n = 0\n def __init__(self):\n  self.n = 0\n  self.log = []\n"
HOLDERS = {
    "local": Holder("n{i} = 0", "n{i}", "n{i} = (n{i} + {v}) % 97"),
    "augmented": Holder("n{i} = 0", "n{i} % 97", "n{i} += {v}"),
    "walrus": Holder("n{i} = 0", "n{i}", "if (n{i} := (n{i} + {v}) % 97) > 200:\n pass"),
    "starred": Holder("n{i}, *r{i} = 0, 1, 2", "n{i} + r{i}[0]", "n{i}, *r{i} = (n{i} + {v}) % 97, r{i}[1], n{i}"),
    "swapped": Holder("a{i}, b{i} = 0, 1", "a{i}", "a{i}, b{i} = b{i}, (a{i} + {v}) % 97"),
    "begins unset": Holder(
        "", "(n{i} if step.number > 0 else 0)", "n{i} = ((n{i} if step.number > 0 else 0) + {v}) % 97", result="n{i}"
    ),
    "begins as None": Holder("n{i} = None", "(n{i} or 0)", "n{i} = {v} if n{i} is None else (n{i} + {v}) % 97"),
    "deleted": Holder("n{i} = 0", "n{i}", "old{i} = n{i}\ndel n{i}\nn{i} = (old{i} + {v}) % 97"),
    "text": Holder("s{i} = ''", "len(s{i}) % 7", "s{i} = s{i}[-5:] + str({v})", result="s{i}"),
    "flag": Holder("f{i} = False", "int(f{i})", "f{i} = not f{i} if ({v}) % 2 else f{i}"),
    "tuple": Holder("p{i} = (0, 1)", "p{i}[0]", "p{i} = (p{i}[1], (p{i}[0] + {v}) % 97)", result="p{i}"),
    "named tuple": Holder(
        "p{i} = P{i}(0, 1)",
        "p{i}.a",
        "p{i} = p{i}._replace(a=(p{i}.a + {v}) % 97)",
        module="P{i} = collections.namedtuple('P{i}', 'a b')",
    ),
    "list": Holder("l{i} = []", "sum(l{i}) % 97", "l{i}.append({v})", result="l{i}"),
    "element": Holder("l{i} = [0, 1]", "l{i}[0]", "l{i}[0] = (l{i}[0] + {v}) % 97", result="l{i}"),
    "slice": Holder("l{i} = [1, 2]", "l{i}[-1]", "l{i}[:] = [l{i}[-1], (l{i}[0] + {v}) % 97]", result="l{i}"),
    "extended": Holder("l{i} = []", "len(l{i})", "l{i} += [{v}] * (({v}) % 3)", result="l{i}"),
    "two names": Holder("l{i} = []\nm{i} = l{i}", "sum(m{i}) % 97", "l{i}.append({v})", result="m{i}, l{i} is m{i}"),
    "inner list": Holder("l{i} = [[0]]", "l{i}[0][-1]", "l{i}[0].append((l{i}[0][-1] + {v}) % 97)", result="l{i}"),
    "list of inner names": Holder(
        "a{i} = [0]\nl{i} = [a{i}]", "l{i}[0][-1]", "a{i}.append((a{i}[-1] + {v}) % 97)", result="l{i}, l{i}[0] is a{i}"
    ),
    "heap": Holder("h{i} = []", "(h{i}[0] if h{i} else 0)", "heapq.heappush(h{i}, -{v})", result="sorted(h{i})"),
    "dictionary": Holder("d{i} = {{}}", "d{i}.get(0, 0)", "d{i}[({v}) % 2] = {v}", result="sorted(d{i}.items())"),
    "setdefault": Holder(
        "d{i} = {{}}", "sum(d{i}.get('k', ())) % 97", "d{i}.setdefault('k', []).append({v})", result="d{i}"
    ),
    "default dictionary": Holder(
        "d{i} = collections.defaultdict(list)",
        "len(d{i}[0])",
        "d{i}[({v}) % 2].append(1)",
        result="sorted(d{i}.items())",
    ),
    "counter": Holder(
        "d{i} = collections.Counter()", "d{i}['a']", "d{i}['ab'[({v}) % 2]] += 1", result="sorted(d{i}.items())"
    ),
    "deque": Holder(
        "q{i} = collections.deque(maxlen=3)", "sum(q{i}) % 97", "q{i}.append({v})", result="list(q{i}), q{i}.maxlen"
    ),
    "popped": Holder(
        "q{i} = collections.deque([1, 2, 3])",
        "q{i}[0]",
        "q{i}.append((q{i}.popleft() + {v}) % 97)",
        result="list(q{i})",
    ),
    "set": Holder("s{i} = set()", "len(s{i})", "s{i}.add({v})", result="sorted(s{i})"),
    "bytes": Holder("y{i} = bytearray(2)", "y{i}[0]", "y{i}[0] = (y{i}[0] + {v}) % 97", result="bytes(y{i})"),
    "array": Holder(
        "y{i} = np.zeros(2, int)", "int(y{i}[0])", "y{i}[0] = (y{i}[0] + {v}) % 97", result="y{i}.tolist()"
    ),
    "scalar of NumPy": Holder("y{i} = np.int64(0)", "int(y{i})", "y{i} = (y{i} + {v}) % 97"),
    "tensor in place": Holder(
        "t{i} = torch.zeros(2)", "int(t{i}[0])", "t{i}.add_({v}).remainder_(97)", result="t{i}.tolist()"
    ),
    "tensor assigned": Holder(
        "t{i} = torch.zeros(2)", "int(t{i}[1])", "t{i} = (t{i} + {v}) % 97", result="t{i}.tolist()"
    ),
    "view of a tensor": Holder(
        "t{i} = torch.zeros(4)\nw{i} = t{i}[2:]",
        "int(t{i}[2])",
        "w{i}.add_({v}).remainder_(97)",
        result="t{i}.tolist()",
    ),
    "list of tensors": Holder(
        "t{i} = [torch.zeros(2), torch.zeros(1)]",
        "int(t{i}[0][0])",
        "for e{i} in t{i}:\n e{i}.add_({v}).remainder_(97)",
        result="[e.tolist() for e in t{i}]",
    ),
    "dictionary of tensors": Holder(
        "t{i} = {{'a': torch.zeros(2)}}",
        "int(t{i}['a'][0])",
        "t{i}['a'] = (t{i}['a'] + {v}) % 97",
        result="t{i}['a'].tolist()",
    ),
    "Python's generator": Holder(
        "r{i} = random.Random(3)", "r{i}.randrange(5)", "r{i}.random() if ({v}) % 2 else 0", result="r{i}.random()"
    ),
    "generator of NumPy": Holder(
        "r{i} = np.random.default_rng(3)", "int(r{i}.integers(5))", "r{i}.random()", result="r{i}.random()"
    ),
    "generator of torch": Holder(
        "r{i} = torch.Generator().manual_seed(3)",
        "int(torch.randint(5, (1,), generator=r{i}))",
        "torch.rand(1, generator=r{i})",
        result="r{i}.get_state().sum().item()",
    ),
    "attribute": Holder("c{i} = Cell{i}()", "c{i}.n", "c{i}.n = (c{i}.n + {v}) % 97", module=_CELL),
    "attribute's list": Holder(
        "c{i} = Cell{i}()", "sum(c{i}.log) % 97", "c{i}.log.append({v})", module=_CELL, result="c{i}.log"
    ),
    "attribute of an attribute": Holder(
        "c{i} = Cell{i}()\nc{i}.inner = Cell{i}()",
        "c{i}.inner.n",
        "c{i}.inner.n = (c{i}.inner.n + {v}) % 97",
        module=_CELL,
    ),
    "attribute of a class": Holder("", "Cell{i}.n", "Cell{i}.n = (Cell{i}.n + {v}) % 97", module=_CELL),
    "attribute by setattr": Holder(
        "c{i} = Cell{i}()", "getattr(c{i}, 'n')", "setattr(c{i}, 'n', (c{i}.n + {v}) % 97)", module=_CELL
    ),
    "attribute by vars": Holder("c{i} = Cell{i}()", "c{i}.n", "vars(c{i})['n'] = (c{i}.n + {v}) % 97", module=_CELL),
    "attribute made late": Holder(
        "c{i} = Cell{i}()",
        "getattr(c{i}, 'late', 0)",
        "c{i}.late = (getattr(c{i}, 'late', 0) + {v}) % 97",
        module=_CELL,
    ),
    "object replaced": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "old{i} = c{i}\nc{i} = Cell{i}()\nc{i}.n = (old{i}.n + {v}) % 97",
        module=_CELL,
    ),
    "list of objects": Holder(
        "c{i} = [Cell{i}(), Cell{i}()]",
        "c{i}[-1].n",
        "for o{i} in c{i}:\n o{i}.n = (o{i}.n + {v}) % 97",
        module=_CELL,
        result="[o.n for o in c{i}]",
    ),
    "dictionary of objects": Holder(
        "c{i} = {{'a': Cell{i}()}}",
        "c{i}['a'].n",
        "c{i}['a'].n = (c{i}['a'].n + {v}) % 97",
        module=_CELL,
    ),
    "method": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "c{i}.add({v})",
        module=_CELL + " def add(self, v):\n  self.n = (self.n + v) % 97\n",
    ),
    "method that calls one": Holder(
        "c{i} = Cell{i}()",
        "c{i}.get()",
        "c{i}.add({v})",
        module=_CELL
        + " def add(self, v):\n  self._put(self.n + v)\n def _put(self, v):\n  self.n = v % 97\n def get(self):\n  return self.n\n",
    ),
    "inherited method": Holder(
        "c{i} = Sub{i}()",
        "c{i}.n",
        "c{i}.add({v})",
        module=_CELL
        + " def add(self, v):\n  self.n = (self.n + v) % 97\nclass Sub{i}(Cell{i}):\n def add(self, v):\n  super().add(v + 1)\n",
    ),
    "bound method": Holder(
        "c{i} = Cell{i}()\nadd{i} = c{i}.add",
        "c{i}.n",
        "add{i}({v})",
        module=_CELL + " def add(self, v):\n  self.n = (self.n + v) % 97\n",
    ),
    "class method": Holder(
        "",
        "Cell{i}.n",
        "Cell{i}.add({v})",
        module=_CELL + " @classmethod\n def add(cls, v):\n  cls.n = (cls.n + v) % 97\n",
    ),
    "called object": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "c{i}({v})",
        module=_CELL + " def __call__(self, v):\n  self.n = (self.n + v) % 97\n",
    ),
    "property": Holder(
        "c{i} = Cell{i}()",
        "c{i}.value",
        "c{i}.value = c{i}.value + {v}",
        module=_CELL
        + " @property\n def value(self):\n  return self.n\n @value.setter\n def value(self, v):\n  self.n = v % 97\n",
    ),
    "item of an object": Holder(
        "c{i} = Cell{i}()",
        "c{i}['k']",
        "c{i}['k'] = c{i}['k'] + {v}",
        module=_CELL
        + " def __getitem__(self, k):\n  return self.n\n def __setitem__(self, k, v):\n  self.n = v % 97\n",
    ),
    "operator": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "c{i} += {v}",
        module=_CELL + " def __iadd__(self, v):\n  self.n = (self.n + v) % 97\n  return self\n",
    ),
    "context": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "with c{i}:\n pass",
        module=_CELL + " def __enter__(self):\n  return self\n def __exit__(self, *_):\n  self.n = (self.n + 3) % 97\n",
    ),
    "slots": Holder(
        "c{i} = Slot{i}()",
        "c{i}.n",
        "c{i}.n = (c{i}.n + {v}) % 97",
        module="class Slot{i}:\n __slots__ = ('n',)\n def __init__(self):\n  self.n = 0\n",
    ),
    "dataclass": Holder(
        "c{i} = Data{i}()",
        "c{i}.n + len(c{i}.log)",
        "c{i}.n = (c{i}.n + {v}) % 97\nc{i}.log.append({v})",
        module="@dataclasses.dataclass\nclass Data{i}:\n n: int = 0\n log: list = dataclasses.field(default_factory=list)\n",
        result="c{i}.n, c{i}.log",
    ),
    "namespace": Holder("c{i} = types.SimpleNamespace(n=0)", "c{i}.n", "c{i}.n = (c{i}.n + {v}) % 97"),
    "attribute of a function": Holder(
        "", "up{i}.n", "up{i}({v})", module="def up{i}(v):\n up{i}.n = (up{i}.n + v) % 97\nup{i}.n = 0\n"
    ),
    "global": Holder(
        "", "g{i}", "up{i}({v})", module="g{i} = 0\ndef up{i}(v):\n global g{i}\n g{i} = (g{i} + v) % 97\n"
    ),
    "global through two calls": Holder(
        "",
        "g{i}",
        "up{i}({v})",
        module="g{i} = 0\ndef up{i}(v):\n inner{i}(v + 1)\ndef inner{i}(v):\n global g{i}\n g{i} = (g{i} + v) % 97\n",
    ),
    "global list": Holder(
        "", "sum(g{i}) % 97", "up{i}({v})", module="g{i} = []\ndef up{i}(v):\n g{i}.append(v)\n", result="g{i}"
    ),
    "list that is passed": Holder(
        "l{i} = []", "sum(l{i}) % 97", "up{i}(l{i}, {v})", module="def up{i}(to, v):\n to.append(v)\n", result="l{i}"
    ),
    "object that is passed": Holder(
        "c{i} = Cell{i}()", "c{i}.n", "up{i}(v={v}, c=c{i})", module=_CELL + "def up{i}(c, v):\n c.n = (c.n + v) % 97\n"
    ),
    "default of a parameter": Holder(
        "", "up{i}(0)", "up{i}({v})", module="def up{i}(v, seen=[]):\n seen.append(v)\n return sum(seen) % 97\n"
    ),
    "closure": Holder(
        "",
        "get{i}()",
        "up{i}({v})",
        module="def make{i}():\n n = 0\n def up(v):\n  nonlocal n\n  n = (n + v) % 97\n def get():\n  return n\n return up, get\n"
        "up{i}, get{i} = make{i}()\n",
    ),
    "function inside": Holder(
        "n{i} = 0\ndef up{i}(v):\n nonlocal n{i}\n n{i} = (n{i} + v) % 97", "n{i}", "up{i}({v})", needs_function=True
    ),
    "lambda": Holder("l{i} = []\nup{i} = lambda v: l{i}.append(v)", "sum(l{i}) % 97", "up{i}({v})", result="l{i}"),
    "partial": Holder(
        "l{i} = []\nup{i} = functools.partial(put{i}, l{i})",
        "sum(l{i}) % 97",
        "up{i}({v})",
        module="def put{i}(to, v):\n to.append(v)\n",
        result="l{i}",
    ),
    "decorated": Holder(
        "",
        "calls{i}[0]",
        "up{i}({v})",
        module="calls{i} = [0]\ndef counted{i}(f):\n @functools.wraps(f)\n def call(*a):\n  calls{i}[0] += 1\n  return f(*a)\n"
        " return call\n@counted{i}\ndef up{i}(v):\n return v\n",
        result="calls{i}",
    ),
    "registry": Holder(
        "",
        "sum(reg{i}['a'].values()) % 97",
        "reg{i}['a'].update(k{i}={v})",
        module="reg{i} = {{'a': {{}}}}\n",
        result="reg{i}",
    ),
    "picked out of a table": Holder("l{i} = [0]", "l{i}[-1]", "{{'up': l{i}.append}}['up']({v})", result="l{i}"),
    "iterator": Holder("it{i} = itertools.count()", "0", "last{i} = next(it{i})", result="next(it{i})"),
    "generator": Holder(
        "it{i} = gen{i}()", "next(it{i})", "pass", module="def gen{i}():\n n = 0\n while True:\n  n += 1\n  yield n\n"
    ),
    "module of a friend": Holder("", "math.n{i}", "math.n{i} = (math.n{i} + {v}) % 97", module="math.n{i} = 0\n"),
    "enum": Holder(
        "e{i} = Kind{i}.A",
        "e{i}.value",
        "e{i} = Kind{i}.B if ({v}) % 2 else Kind{i}.A",
        module="class Kind{i}(enum.Enum):\n A = 1\n B = 2\n",
        result="e{i}.value",
    ),
    "fraction": Holder("f{i} = fractions.Fraction(1, 3)", "int(f{i})", "f{i} = f{i} + {v}", result="str(f{i})"),
    "date": Holder(
        "f{i} = datetime.timedelta(0)", "f{i}.days % 97", "f{i} = f{i} + datetime.timedelta({v})", result="f{i}.days"
    ),
}

HOLDERS |= {
    "global by its table": Holder(
        "", "globals()['g{i}']", "globals()['g{i}'] = (g{i} + {v}) % 97", module="g{i} = 0\n"
    ),
    "list that is returned": Holder(
        "", "sum(get{i}()) % 97", "get{i}().append({v})", module="l{i} = []\ndef get{i}():\n return l{i}\n"
    ),
    "dictionary that is returned": Holder(
        "", "get{i}()['n']", "get{i}()['n'] += {v}", module="d{i} = {{'n': 0}}\ndef get{i}():\n return d{i}\n"
    ),
    "list of a property": Holder(
        "c{i} = Cell{i}()",
        "sum(c{i}.items) % 97",
        "c{i}.items.append({v})",
        module=_CELL + " @property\n def items(self):\n  return self.log\n",
    ),
    "property that counts": Holder(
        "c{i} = Cell{i}()",
        "c{i}.next",
        "c{i}.next",
        module=_CELL + " @property\n def next(self):\n  self.n += 1\n  return self.n\n",
        result="c{i}.n",
    ),
    "cached property": Holder(
        "c{i} = Cell{i}()",
        "len(c{i}.table) % 7",
        "c{i}.table[{v}] = 1",
        module=_CELL + " @functools.cached_property\n def table(self):\n  return {{}}\n",
        result="sorted(c{i}.table)",
    ),
    "class of the object": Holder(
        "c{i} = Cell{i}()", "type(c{i}).n", "type(c{i}).n += {v}", module="class Cell{i}:\n n = 0\n"
    ),
    "class by __class__": Holder(
        "c{i} = Cell{i}()",
        "c{i}.get()",
        "c{i}.add({v})",
        module="class Cell{i}:\n n = 0\n def get(self):\n  return self.__class__.n\n def add(self, v):\n  self.__class__.n += v\n",
    ),
    "list of a class": Holder("", "len(Cell{i}.log)", "Cell{i}.log.append({v})", module="class Cell{i}:\n log = []\n"),
    "static method": Holder(
        "",
        "len(Cell{i}.log)",
        "Cell{i}.add({v})",
        module="class Cell{i}:\n log = []\n @staticmethod\n def add(v):\n  Cell{i}.log.append(v)\n",
    ),
    "assignment by __setattr__": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "c{i}.n = c{i}.n + {v}",
        module="class Cell{i}:\n def __init__(self):\n  self.n = 0\n def __setattr__(self, k, v):\n  object.__setattr__(self, k, v % 97)\n",
    ),
    "attribute by __getattr__": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "c{i}.n = c{i}.n + {v}",
        module="class Cell{i}:\n def __init__(self):\n  self.__dict__['kept'] = {{'n': 0}}\n def __getattr__(self, k):\n  return self.kept[k]\n"
        " def __setattr__(self, k, v):\n  self.kept[k] = v % 97\n",
    ),
    "attributes in a loop": Holder(
        "c{i} = Cell{i}()", "c{i}.n", "for k in ('n', 'm'):\n setattr(c{i}, k, getattr(c{i}, k, 0) + {v})", module=_CELL
    ),
    "updated table of attributes": Holder(
        "c{i} = Cell{i}()", "c{i}.n", "c{i}.__dict__.update(n=(c{i}.n + {v}) % 97)", module=_CELL
    ),
    "descriptor": Holder(
        "c{i} = Cell{i}()",
        "c{i}.v",
        "c{i}.v = c{i}.v + {v}",
        module="class D{i}:\n def __get__(self, o, t=None):\n  return o.kept\n def __set__(self, o, v):\n  o.kept = v % 97\n"
        "class Cell{i}:\n v = D{i}()\n def __init__(self):\n  self.kept = 0\n",
        result="c{i}.kept",
    ),
    "subclass of dict": Holder(
        "d{i} = D{i}()",
        "d{i}.get('n', 0)",
        "d{i}['n'] = d{i}.get('n', 0) + {v}",
        module="class D{i}(dict):\n pass\n",
        result="dict(d{i})",
    ),
    "subclass of list": Holder(
        "d{i} = D{i}()", "len(d{i})", "d{i}.append({v})", module="class D{i}(list):\n pass\n", result="list(d{i})"
    ),
    "user dictionary": Holder(
        "d{i} = D{i}()",
        "d{i}.get('n', 0)",
        "d{i}['n'] = d{i}.get('n', 0) + {v}",
        module="class D{i}(collections.UserDict):\n pass\n",
        result="d{i}.data",
    ),
    "ordered dictionary": Holder(
        "d{i} = collections.OrderedDict(a=1, b=2)",
        "next(iter(d{i}.values()))",
        "d{i}.move_to_end(next(iter(d{i})))",
        result="list(d{i}.items())",
    ),
    "chain map": Holder(
        "d{i} = collections.ChainMap({{}}, {{'n': 1}})", "d{i}['n']", "d{i}['n'] = d{i}['n'] + {v}", result="dict(d{i})"
    ),
    "queue": Holder("q{i} = queue.Queue()\nq{i}.put(1)", "q{i}.qsize()", "q{i}.put({v})", result="list(q{i}.queue)"),
    "mapped": Holder("l{i} = []", "len(l{i})", "list(map(l{i}.append, [{v}]))", result="l{i}"),
    "mapped by the user's": Holder(
        "", "len(l{i})", "list(map(up{i}, [{v}]))", module="l{i} = []\ndef up{i}(v):\n l{i}.append(v)\n", result="l{i}"
    ),
    "sorted in place": Holder("l{i} = [3, 1, 2]", "l{i}[0]", "l{i}.sort(key=lambda e: (e * {v}) % 4)", result="l{i}"),
    "in a condition": Holder("l{i} = []", "len(l{i})", "({v}) and l{i}.append({v})", result="l{i}"),
    "in a comprehension": Holder("l{i} = []", "len(l{i})", "[l{i}.append(e) for e in ({v}, 1)]", result="l{i}"),
    "in a formatted string": Holder(
        "",
        "g{i}[0]",
        "text{i} = f'{{up{i}({v})}}'",
        module="g{i} = [0]\ndef up{i}(v):\n g{i}[0] += v\n return v\n",
        result="g{i}",
    ),
    "returned and kept": Holder(
        "n{i} = 0", "n{i}", "n{i} = up{i}(n{i}, {v})", module="def up{i}(n, v):\n return (n + v) % 97\n"
    ),
    "recursive": Holder(
        "l{i} = []",
        "len(l{i})",
        "up{i}(l{i}, 2)",
        module="def up{i}(to, n):\n to.append(n)\n if n > 0:\n  up{i}(to, n - 1)\n",
        result="l{i}",
    ),
    "defined in the step": Holder(
        "l{i} = []", "len(l{i})", "def add{i}(v):\n l{i}.append(v)\nadd{i}({v})", result="l{i}"
    ),
    "given back to a name": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "c{i} = c{i}.plus({v})",
        module=_CELL + " def plus(self, v):\n  made = Cell{i}()\n  made.n = (self.n + v) % 97\n  return made\n",
    ),
    "chained calls": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "c{i}.plus({v}).plus(1)",
        module=_CELL + " def plus(self, v):\n  self.n = (self.n + v) % 97\n  return self\n",
    ),
    "alias in the step": Holder(
        "d{i} = {{'l': []}}", "len(d{i}['l'])", "to{i} = d{i}['l']\nto{i}.append({v})", result="d{i}"
    ),
    "alias of an attribute": Holder(
        "c{i} = Cell{i}()", "len(c{i}.log)", "to{i} = c{i}.log\nto{i}.append({v})", module=_CELL, result="c{i}.log"
    ),
    "unpacked alias": Holder(
        "l{i}, m{i} = [], []", "len(l{i})", "for to{i} in (l{i}, m{i}):\n to{i}.append({v})", result="l{i}, m{i}"
    ),
    "chosen by a key": Holder(
        "d{i} = {{'a': Cell{i}(), 'b': Cell{i}()}}",
        "d{i}['a'].n",
        "d{i}['ab'[step.number % 2]].n += {v}",
        module=_CELL,
        result="[c.n for c in d{i}.values()]",
    ),
    "parent and child": Holder(
        "c{i} = Cell{i}()\nc{i}.child = Cell{i}()\nc{i}.child.parent = c{i}",
        "c{i}.child.parent.n",
        "c{i}.child.parent.n = (c{i}.n + {v}) % 97",
        module=_CELL,
        result="c{i}.n, c{i}.child.parent is c{i}",
    ),
    "two that share one": Holder(
        "s{i} = Cell{i}()\na{i}, b{i} = [s{i}], [s{i}]",
        "b{i}[0].n",
        "a{i}[0].n = (a{i}[0].n + {v}) % 97",
        module=_CELL,
        result="b{i}[0].n, a{i}[0] is b{i}[0]",
    ),
    "moved between two": Holder(
        "a{i}, b{i} = [[1], [2]], [[3]]",
        "b{i}[0][0]",
        "a{i}.append(b{i}.pop(0))\nb{i}.append(a{i}.pop(0))\nb{i}[0].append({v})",
        result="a{i}, b{i}",
    ),
    "swapped objects": Holder(
        "a{i}, b{i} = Cell{i}(), Cell{i}()\nf{i} = a{i}",
        "f{i}.n + 2 * a{i}.n",
        "a{i}, b{i} = b{i}, a{i}\na{i}.n += {v}",
        module=_CELL,
        result="a{i}.n, b{i}.n, f{i}.n",
    ),
    "best so far": Holder("best{i} = None", "(best{i} or 0)", "if best{i} is None or x > best{i}:\n best{i} = x"),
    "copy of the best": Holder(
        "l{i}, best{i} = [], []",
        "len(best{i})",
        "l{i}.append({v})\nif x % 2:\n best{i} = copy.deepcopy(l{i})",
        result="l{i}, best{i}",
    ),
    "patience": Holder("w{i} = 0", "w{i}", "w{i} = 0 if x % 4 == 0 else w{i} + 1"),
    "generator of the user's that is made anew": Holder(
        "l{i} = []",
        "len(l{i})",
        "for e{i} in gen{i}():\n l{i}.append(e{i})",
        module="def gen{i}():\n yield 1\n yield 2\n",
        result="l{i}",
    ),
    "yielded and counted": Holder(
        "",
        "g{i}[0]",
        "for e{i} in gen{i}():\n pass",
        module="g{i} = [0]\ndef gen{i}():\n g{i}[0] += 1\n yield 2\n",
        result="g{i}",
    ),
    "iterated object": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "for e{i} in c{i}:\n pass",
        module=_CELL + " def __iter__(self):\n  self.n += 1\n  return iter(())\n",
    ),
    "context of a generator": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "with c{i}.timed({v}):\n pass",
        module=_CELL + " @contextlib.contextmanager\n def timed(self, v):\n  yield\n  self.n = (self.n + v) % 97\n",
    ),
    "decorator with a count": Holder(
        "",
        "up{i}.calls",
        "up{i}({v})",
        module="def counted{i}(f):\n @functools.wraps(f)\n def call(*a):\n  call.calls += 1\n  return f(*a)\n call.calls = 0\n return call\n@counted{i}\ndef up{i}(v):\n return v\n",
    ),
    "decorator with a variable": Holder(
        "",
        "up{i}(0)",
        "up{i}({v})",
        module="def adding{i}(f):\n total = 0\n def call(v):\n  nonlocal total\n  total += f(v)\n  return total % 97\n return call\n@adding{i}\ndef up{i}(v):\n return v\n",
    ),
    "class as a decorator": Holder(
        "",
        "up{i}.n",
        "up{i}({v})",
        module="class Counted{i}:\n def __init__(self, f):\n  self.f, self.n = f, 0\n def __call__(self, v):\n  self.n += 1\n  return self.f(v)\n@Counted{i}\ndef up{i}(v):\n return v\n",
    ),
    "memory of a function": Holder(
        "",
        "len(memo{i})",
        "up{i}({v})",
        module="memo{i} = {{}}\ndef up{i}(v):\n if v not in memo{i}:\n  memo{i}[v] = v\n return memo{i}[v]\n",
        result="memo{i}",
    ),
    "metric": Holder(
        "m{i} = Metric{i}()",
        "int(m{i}.compute())",
        "m{i}.update(torch.tensor(float({v})))",
        module="class Metric{i}:\n def __init__(self):\n  self.reset()\n def reset(self):\n  self.total, self.count = torch.zeros(()), 0\n"
        " def update(self, v):\n  self.total += v\n  self.count += 1\n def compute(self):\n  return self.total / max(self.count, 1)\n",
    ),
    "metric that is reset": Holder(
        "m{i} = Metric{i}()",
        "m{i}.total",
        "m{i}.total += {v}\nif step.number % 3 == 2:\n m{i}.reset()",
        module="class Metric{i}:\n def __init__(self):\n  self.reset()\n def reset(self):\n  self.total = 0\n",
    ),
    "history by name": Holder(
        "h{i} = collections.defaultdict(lambda: collections.deque(maxlen=2))",
        "len(h{i}['a'])",
        "h{i}['ab'[({v}) % 2]].append({v})",
        result="sorted((k, list(v)) for k, v in h{i}.items())",
    ),
    "replay buffer": Holder(
        "p{i}, at{i} = [None] * 4, 0",
        "(p{i}[0] or (0, 0))[1]",
        "p{i}[at{i}] = (torch.ones(1), {v})\nat{i} = (at{i} + 1) % 4",
        result="[e and e[1] for e in p{i}], at{i}",
    ),
    "nested dataclasses": Holder(
        "s{i} = State{i}()",
        "s{i}.meter.n",
        "s{i}.meter.n += {v}\ns{i}.step += 1",
        module="@dataclasses.dataclass\nclass Meter{i}:\n n: int = 0\n@dataclasses.dataclass\nclass State{i}:\n meter: Meter{i} = dataclasses.field(default_factory=Meter{i})\n step: int = 0\n",
        result="s{i}.meter.n, s{i}.step",
    ),
    "frozen dataclass": Holder(
        "s{i} = State{i}()",
        "s{i}.n",
        "s{i} = dataclasses.replace(s{i}, n=(s{i}.n + {v}) % 97)",
        module="@dataclasses.dataclass(frozen=True)\nclass State{i}:\n n: int = 0\n",
    ),
    "callbacks": Holder(
        "c{i} = Cell{i}()\ncalls{i} = [c{i}.add]",
        "c{i}.n",
        "for call{i} in calls{i}:\n call{i}({v})",
        module=_CELL + " def add(self, v):\n  self.n = (self.n + v) % 97\n",
    ),
    "callbacks by name": Holder(
        "c{i} = Cell{i}()",
        "c{i}.n",
        "getattr(c{i}, 'a' + 'dd')({v})",
        module=_CELL + " def add(self, v):\n  self.n = (self.n + v) % 97\n",
    ),
    "argument with stars": Holder(
        "l{i} = []", "len(l{i})", "up{i}(*(l{i}, {v}))", module="def up{i}(to, v):\n to.append(v)\n", result="l{i}"
    ),
    "arguments in a dictionary": Holder(
        "l{i} = []",
        "len(l{i})",
        "up{i}(**{{'to': l{i}, 'v': {v}}})",
        module="def up{i}(to, v):\n to.append(v)\n",
        result="l{i}",
    ),
    "array grown": Holder("y{i} = np.zeros(0)", "len(y{i})", "y{i} = np.append(y{i}, {v})", result="y{i}.tolist()"),
    "tensor grown": Holder(
        "t{i} = torch.zeros(0)", "len(t{i})", "t{i} = torch.cat([t{i}, torch.ones(1)])[-4:]", result="t{i}.tolist()"
    ),
    "tensor by index": Holder(
        "t{i} = torch.zeros(4)", "int(t{i}.sum())", "t{i}[step.number % 4] = {v}", result="t{i}.tolist()"
    ),
    "tensor by its data": Holder(
        "t{i} = torch.zeros(2)", "int(t{i}[0])", "t{i}.data.add_({v})", result="t{i}.tolist()"
    ),
    "tensor by out": Holder(
        "t{i} = torch.zeros(2)", "int(t{i}[0])", "torch.add(t{i}, {v}, out=t{i})", result="t{i}.tolist()"
    ),
    "array by out": Holder("y{i} = np.zeros(2)", "int(y{i}[0])", "np.add(y{i}, {v}, out=y{i})", result="y{i}.tolist()"),
    "lists of operator": Holder("l{i} = [0]", "l{i}[0]", "operator.setitem(l{i}, 0, {v})", result="l{i}"),
    "module's own buffer": Holder(
        "m{i} = M{i}()",
        "int(m{i}.seen)",
        "m{i}.seen += {v}",
        module="class M{i}(torch.nn.Module):\n def __init__(self):\n  super().__init__()\n  self.register_buffer('seen', torch.zeros(()))\n",
    ),
    "module's own count": Holder(
        "m{i} = M{i}()",
        "m{i}.n",
        "m{i}(torch.ones(1))",
        module="class M{i}(torch.nn.Module):\n def __init__(self):\n  super().__init__()\n  self.n = 0\n def forward(self, t):\n  self.n += 1\n  return t\n",
    ),
}

IMPORTS = (
    "import collections, contextlib, dataclasses, datetime, enum, fractions, functools, heapq, itertools\n"
    "import copy, math, operator, queue, random, torch, types\nimport numpy as np\n"
)
# Where an update stands: `{}` is the statement.
WRAPPED = (
    "{}",
    "{}",
    "{}",
    "if step.number % 2:\n{1}",
    "if step.number >= 2:\n{1}",
    "if step.number >= 4:\n{1}",
    "if x % 3 == 0:\n{1}",
    "for _ in range(2):\n{1}",
    "try:\n{1}\nfinally:\n pass",
    "try:\n if step.number % 2:\n  raise ValueError\nexcept ValueError:\n{1}",
    "match step.number % 3:\n case 0 | 1:\n{2}\n case _:\n  pass",
    "with contextlib.nullcontext():\n{1}",
    "left = 2\nwhile left > 0:\n left -= 1\n{1}",
)
FORMS = ("function", "module", "method", "nested", "entered")


@dataclass(frozen=True)
class Script:
    """A composed script: its source, and the parts of which it is made."""

    source: str
    parts: tuple[str, ...]


def compose(seed: int) -> Script:
    """The script of a seed."""
    draw = random.Random(f"carried/{seed}")
    form = draw.choice(FORMS)
    names = draw.sample(
        [name for name, one in HOLDERS.items() if form != "module" or not one.needs_function], draw.randint(1, 3)
    )
    head, begin, block, above, after, results = [], [], [], [], [], ["x"]
    for number, name in enumerate(names):
        holder, where = HOLDERS[name], draw.choice((block, block, block, block, block, above, after))
        adds = draw.choice(("step.number + 1", "step.number * 3 + x % 5", "2", *(["int(b)"] if where is block else [])))
        begin.append(holder.begin.format(i=number))
        head.append(holder.module.format(i=number))
        results.append(f"({(holder.result or holder.read).format(i=number)})")
        read = f"x = (x * 3 + int(b) + {holder.read.format(i=number)}) % 1009"
        update = _wrap(draw.choice(WRAPPED), holder.update.format(i=number, v=adds))
        if where is after:
            update = f"if step.committed:\n{indent(update, ' ')}"
        pair = [(block, read), (where, update)]
        if draw.random() < 0.5:
            pair.reverse()
        for to, statement in pair:
            to.insert(draw.randrange(len(to) + 1) if draw.random() < 0.3 else len(to), statement)
    parts = (form, *names)
    block = [f"{statement}\nstep.point({number}, x)" for number, statement in enumerate(block)]
    return Script(_assemble(form, head, begin, above, block, after, results), parts)


def _wrap(pattern: str, statement: str) -> str:
    text = pattern
    for depth in (1, 2):
        text = text.replace(f"{{{depth}}}", indent(statement, " " * depth))
    return text.replace("{}", statement)


def _assemble(
    form: str,
    head: list[str],
    begin: list[str],
    above: list[str],
    block: list[str],
    after: list[str],
    results: list[str],
) -> str:
    lines = "\n".join
    body = lines([*above, "with step as b:", *(indent(one, " ") for one in block), *after])
    loop = f"for step in steps():\n{indent(body, ' ')}"
    start, end = lines(["x = 1", *begin]), f"({', '.join(results)},)"
    top = IMPORTS + lines(head) + "\n"
    if form == "module":
        return f"{top}{start}\n{loop}\nresult = {end}\n"
    if form == "method":
        inner = indent(f"{start}\n{loop}\nreturn {end}", "  ")
        return f"{top}class Trainer:\n def train(self):\n{inner}\nresult = Trainer().train()\n"
    if form == "nested":
        inner = indent(f"{start}\n{loop}\nreturn {end}", "  ")
        return f"{top}def main():\n def train():\n{inner}\n return train()\nresult = main()\n"
    if form == "entered":
        inner = indent(f"{start}\noffered = steps()\nfor step in offered:\n{indent(body, ' ')}\nreturn {end}", " ")
        return f"{top}def main(a=1, *, k=2):\n{inner}\nresult = main(k=3)\n"
    return f"{top}def main():\n{indent(f'{start}{chr(10)}{loop}{chr(10)}return {end}', ' ')}\nresult = main()\n"


def judge(script: Script, seed: int, directory: Path) -> str:
    """`equal`, `refused: ...`, `doubted: ...`, or `SILENT: ...`."""
    draw = random.Random(f"faults/{seed}")
    first = Loop()
    try:
        expected = run_script(script.source, first, directory)
    except UsageError as error:
        return f"refused: {error}"
    except NameError:
        return "no script: it reads a name that has no value yet"
    for number in range(STEPS):
        points = script.source.count("step.point(")
        again = Loop(fails_at=number, fails_in=draw.randrange(points))
        found = run_script(script.source, again, directory)
        if found != expected and not (again.doubt or again.said):
            return f"SILENT: interrupted in step {number}: {found} instead of {expected}"
    doubts = []
    for version in range(STEPS + 1):
        again = Loop(begins_at=version, tree=decode_tree(first.kept[version]))
        found = run_script(script.source, again, directory)
        if found == expected:
            continue
        doubt = again.doubt or first.doubt or "; ".join({*first.said, *again.said})
        if not doubt:
            return f"SILENT: replaced at version {version}: {found} instead of {expected}"
        doubts.append(doubt)
    return f"doubted: {doubts[0]}" if doubts else "equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0..999", help="A..B, both included, or one")
    parser.add_argument("--show", action="store_true", help="the scripts")
    options = parser.parse_args()
    low, _, high = options.seeds.partition("..")
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(int(low), int(high or low) + 1):
            script = compose(seed)
            if options.show:
                print(script.source)
            verdict = judge(script, seed, Path(directory))
            kind = verdict.partition(":")[0]
            counts[kind] = counts.get(kind, 0) + 1
            if kind != "equal" or options.show:
                print(f"{seed} {', '.join(script.parts)}: {verdict}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    sys.exit("SILENT" in counts)


if __name__ == "__main__":
    main()
