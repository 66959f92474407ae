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

IMPORTS = (
    "import collections, contextlib, dataclasses, datetime, enum, fractions, functools, heapq, itertools\n"
    "import math, random, torch, types\nimport numpy as np\n"
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
