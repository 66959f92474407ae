"""Variables that a loop carries from step to step, found in its code; each line that writes one is marked `#w`."""

from pathlib import Path
from textwrap import indent

import pytest

from relight.training.carried.code.refs import describe
from tests.training.carried_shapes import read_script, shown


def fn(block: str, *, before: str = "", first: str = "", after: str = "", setup: str = "", head: str = "") -> str:
    """A function with a loop: `before` stands above the loop, `first` and `after` around `with step`."""
    head = head or "for step in steps():"
    body = f"{indent(first, '  ')}\n  with step as b:\n{indent(block, '   ')}\n{indent(after, '  ')}"
    return f"{setup}\ndef run():\n{indent(before, ' ')}\n {head}\n{body}\nrun()\n"


def top(block: str, *, before: str = "", after: str = "", head: str = "for step in steps():") -> str:
    """Find in a loop at module level."""
    return f"{before}\n{head}\n with step as b:\n{indent(block, '  ')}\n{indent(after, ' ')}\n"


TRAINER = """
class Trainer:
 def __init__(self):
  self.baseline = 0.0
  self.history = []
  self.last = None
"""

MODULE = """
from torch import nn
class M(nn.Module):
 def __init__(self):
  super().__init__()
  self.n = 0
 def forward(self, x):
  self.n += 1 #w
  return x * self.n
"""

# name: (source, what is found; ~ stands before what is only accumulated or shown)
SHAPES = {
    "on one line": ("m = 0\nfor step in steps():\n with step as b: m = f(b, m) #w", "~m"),
    "attributes and items of the batch": (fn("b.x = b.x * 2\nb['y'] = b['y'] + 1\nb.z += 1\nloss = b.x + b['y']"), ""),
    "nothing": (fn("x = b\ny = x + 1\ny.backward()"), ""),
    "library's module, its mode": (
        fn(
            "model(b).sum().backward()",
            first="model.train()",
            after="model.eval()\nprint(model(1))\nmodel.train()",
            before="from torch import nn\nmodel = nn.Identity()",
        ),
        "",
    ),
    "files that it asks for, made after the block": (
        fn(
            "if os.path.exists(path):\n b = b * 2\nb.backward()",
            after="if step.committed:\n with open(path, 'w') as file: #w\n  file.write('1')",
            before="import os\npath = 'best'",
        ),
        "files that steps ask for",
    ),
    "files that it asks for, to remove or make them": (
        fn(
            "torch.save(b, path)\nif path.exists():\n path.unlink()\nif not os.path.isdir('a'):\n os.makedirs('a')\n"
            "is_new = not os.path.exists('log')\nwith open('log', 'a') as log:\n if is_new: log.write('head')",
            before="import os, pathlib, torch\npath = pathlib.Path('best')",
        ),
        "",
    ),
    "files that it opens, or else goes on without": (
        fn(
            "try:\n b = b * torch.load(path)\nexcept FileNotFoundError:\n pass\nb.backward()",
            after="if step.committed:\n torch.save(b, path) #w",
            before="import torch\npath = 'best'",
        ),
        "files that steps ask for",
    ),
    "files that it reads, or else anything": (
        fn(
            "try:\n with open(path) as file: b = b * float(file.read())\nexcept:\n b = b * 2\nb.backward()",
            after="if step.committed:\n os.rename(path, 'old') #w",
            before="import os\npath = 'best'",
        ),
        "files that steps ask for",
    ),
    "files that it reads if it can": (
        fn(
            "with contextlib.suppress(FileNotFoundError):\n b = float(path.read_text())\n"
            "with contextlib.suppress(FileNotFoundError):\n path.unlink() #w\nb.backward()",
            before="import contextlib, pathlib\npath = pathlib.Path('best')",
        ),
        "files that steps ask for",
    ),
    "files that it lists": (
        fn(
            "b = b * len(glob.glob('*.pt'))\nb.backward()",
            after="if step.committed:\n shutil.move('a.pt', 'b') #w",
            before="import glob, shutil",
        ),
        "files that steps ask for",
    ),
    "files that it lists, to keep the newest": (
        fn(
            "b.backward()",
            after="torch.save(b, 'a.pt')\nold = sorted(glob.glob('*.pt'))\nif len(old) > 3:\n for one in old[:-3]:\n"
            "  os.remove(one)\nwhile len(old) > 3:\n old.pop(0).unlink()\n"
            "for one in sorted(root.iterdir())[:-3]:\n one.unlink()\nshutil.rmtree(old[0])",
            before="import glob, os, pathlib, shutil, torch\nroot = pathlib.Path('.')",
        ),
        "",
    ),
    "files that it removes if they are there, or saves if it can": (
        fn(
            "try:\n os.remove('a')\nexcept FileNotFoundError:\n pass\ntry:\n torch.save(b, 'a')\nexcept OSError as e:\n"
            " print(e)\ntry:\n with open('log', 'a') as log: log.write('1')\nexcept Exception:\n pass\nb.backward()",
            before="import os, torch",
        ),
        "",
    ),
    "files that it waits for": (
        fn(
            "while not os.path.exists('a'):\n assert b\n time.sleep(0.1)\nif path.exists():\n time.sleep(1)",
            after="path.touch()",
            before="import os, pathlib, time\npath = pathlib.Path('best')",
        ),
        "",
    ),
    "library's object, called for an effect": (
        fn("thing.acquire()\nif thing.locked(): b.backward()", before="import threading\nthing = threading.Lock()"),
        "",
    ),
    "a log of one rank": (
        fn(
            "b.backward()",
            before="import sys\nlog = open('/dev/null', 'a') if RANK == 0 else None",
            setup="RANK = 0",
            after="print(1, file=log)",
        ),
        "",
    ),
    "no log on another rank": (
        fn(
            "b.backward()",
            before="log = open('/dev/null', 'a') if RANK == 0 else None",
            setup="RANK = 1",
            after="print(1, file=log)",
        ),
        "",
    ),
    "loss alone": (fn("loss = f(b)\nloss.backward()\nopt.step()", before="opt = f = None"), ""),
    "hidden state": (fn("out = b + h\nout.backward()\nh = out.detach() #w", before="h = 0"), "h"),
    "hidden state at module level": (top("h = f(b, h) #w\nh.backward()", before="h = 0"), "h"),
    "hidden pair": (
        fn("out, (h, c) = lstm(b, (h, c)) #w\nout.sum().backward()", before="h = c = lstm = 0"),
        "h|c",
    ),
    "hidden pair detached": (
        fn("hc = tuple(x.detach() for x in hc) #w\nout, hc = lstm(b, hc)\nout.backward()", before="hc = lstm = 0"),
        "hc",
    ),
    "running mean that scales": (
        fn("loss = f(b)\n(loss / mean).backward()\nmean = .9 * mean + .1 * loss.item() #w", before="mean = f = 1"),
        "mean",
    ),
    "running mean that is shown": (
        fn("loss = f(b)\nloss.backward()\nmean = .9 * mean + .1 * loss.item() #w\nprint(mean)", before="mean = f = 1"),
        "~mean",
    ),
    "sum of losses": (fn("loss = b\nloss.backward()\ntotal += loss.item() #w", before="total = 0"), "~total"),
    "list of losses": (fn("loss = b\nlosses.append(loss.item()) #w", before="losses = []"), "~losses"),
    "list of losses between steps": (fn("loss = b", after="losses.append(loss) #w", before="losses = []"), "~losses"),
    "list of losses that is shown": (
        fn("losses.append(b) #w\nif len(losses) > 5:\n print(losses[-1])", before="losses = []"),
        "~losses",
    ),
    "list of losses that decides": (
        fn("losses.append(b) #w\nif losses[-1] > 5:\n b.backward()", before="losses = []"),
        "losses",
    ),
    "early stopping": (
        fn("loss = b", after="if loss < best:\n best = loss #w\nif best < .1:\n break", before="best = 9"),
        "best",
    ),
    "patience": (
        fn(
            "loss = b",
            after="if loss < best:\n best, bad = loss, 0 #w\nelse:\n bad += 1\nif bad > 3:\n break",
            before="best = bad = 0",
        ),
        "best|bad",
    ),
    "counter that decides": (fn("n += 1 #w\nif n % 2 == 0:\n b.backward()", before="n = 0"), "n"),
    "counter that is shown": (fn("n += 1 #w\nprint(n)", before="n = 0"), "~n"),
    "counter that is reported": (fn("n += 1 #w\nstep.report(n)", before="n = 0"), "~n"),
    "average that is shown": (
        fn("n += 1 #w\nt += b #w\nmean = t / n\nprint(f'{mean}')", before="n = t = 0"),
        "~n|~t",
    ),
    "average that decides": (
        fn("n += 1 #w\nt += b #w\nmean = t / n\n(b - mean).backward()", before="n = t = 0"),
        "n|t",
    ),
    "written in one branch": (fn("if b:\n h = 1 #w\nf(h)", before="h = f = 0"), "h"),
    "written in both branches": (fn("if b:\n h = 1\nelse:\n h = 2\nf(h)", before="h = f = 0"), ""),
    "written in a loop": (fn("for x in b:\n h = x #w\nf(h)", before="h = f = 0"), "h"),
    "read in a loop before": (fn("for x in b:\n f(h)\n h = x #w", before="h = f = 0"), "h"),
    "accumulated anew": (fn("t = 0\nfor x in b:\n t += x\nt.backward()"), ""),
    "list filled anew": (fn("xs = []\nfor x in b:\n xs.append(x)\nsum(xs).backward()"), ""),
    "written in try": (fn("try:\n h = g(b) #w\nexcept ValueError:\n pass\nf(h)", before="h = f = g = 0"), "h"),
    "written in try and except": (
        fn("try:\n h = g(b)\nexcept ValueError:\n h = 0\nf(h)", before="h = f = g = 0"),
        "",
    ),
    "written in finally": (fn("try:\n g(b)\nfinally:\n h = 0\nf(h)", before="h = f = g = 0"), ""),
    "written in with": (fn("with g():\n h = b\nf(h)", before="h = f = g = 0"), ""),
    "read in while": (fn("while h < b:\n h += 1 #w\nf(h)", before="h = f = 0"), "h"),
    "walrus": (fn("f(h)\nif (h := b) > 1:\n pass", before="h = f = 0").replace("if (h", "#\n   if (h"), "h"),
    "read between steps": (fn("x = b", first="y = h", after="h = x #w\nf(y)", before="h = f = 0"), "h"),
    "made ready above the block": (
        fn("(b * scale).backward()\nm = b #w", first="scale = m * 2", before="m = 1"),
        "m",
    ),
    "made above the block of nothing": (fn("(b * s).backward()", first="s = step.number"), ""),
    "continue between": (
        fn("loss = b", after="if not step.committed:\n continue\nh = loss #w", first="f(h)", before="h = 0; f = str"),
        "h",
    ),
    "continue before it is written": (
        fn("x = 1", after="if b:\n continue\nh = 1 #w", first="f(h)\nx = 2", before="h = 0; f = str"),
        "h",
    ),
    "dictionary": (fn("seen[step.number % 2] = b #w\nf(seen[0])", before="seen = {}; f = 0"), "seen"),
    "dictionary of counts": (
        fn("counts['x'] += 1 #w\nif counts['x'] > 3:\n f()", before="counts = {'x': 0}; f = 0"),
        "counts",
    ),
    **{
        f"counts of objects in {over}": (
            fn(
                f"for one in {over}:\n one(b)\nf(both['a'].n)",
                before="both = {'a': A()}; f = 0",
                setup="class A:\n n = 0\n def __call__(self, b):\n  self.go(b)\n def go(self, b):\n  self.n += b #w",
            ),
            "both['a'].n",
        )
        for over in ("list(both.values())", "[*both.values()]", "sorted(list(both.values()))", "[both['a']]")
    },
    "list under two names": (
        fn(
            "h.grow(b)\nf(xs[0])",
            before="xs = [1]; h = Has(xs); f = 0",
            setup="class Has:\n def __init__(self, o):\n  self.o = o\n def grow(self, b):\n  self.o.append(b) #w",
        ),
        "h.o|xs",
    ),
    "set": (fn("seen.add(b) #w\nif 3 in seen:\n f()", before="seen = set(); f = 0"), "seen"),
    "deque": (
        fn(
            "q.append(b.item()) #w\nloss = b - sum(q) / len(q)\nloss.backward()",
            before="from collections import deque\nq = deque(maxlen=3)",
        ),
        "q",
    ),
    "heap": (fn("heapq.heappush(q, b) #w\nf(q[0])", before="import heapq\nq = []; f = 0"), "q"),
    "tensor in place": (
        fn("h.mul_(.9).add_(b) #w\nh.sum().backward()", before="import torch\nh = torch.zeros(2)"),
        "h",
    ),
    "tensor's items": (fn("h[step.number % 2] = b #w\nf(h)", before="h = f = 0"), "h"),
    "tensor += ": (fn("h += b #w\nf(h)", before="h = f = 0"), "h"),
    "data of a tensor": (fn("h.data = b #w\nf(h)", before="import torch\nh = torch.zeros(1); f = 0"), "h"),
    "numpy generator": (
        fn(
            "noise = rng.normal() #w\n(b + noise).backward()",
            before="import numpy as np\nrng = np.random.default_rng(1)",
        ),
        "rng",
    ),
    "torch generator": (
        fn("noise = torch.randn(2, generator=g) #w\nf(noise)", before="import torch\ng = torch.Generator(); f = 0"),
        "g",
    ),
    "random.Random": (fn("f(r.random()) #w", before="import random\nr = random.Random(1); f = 0"), "r"),
    "shuffled order": (
        fn("random.shuffle(order) #w\nf(b[order])", before="import random\norder = [1]; f = 0"),
        "order",
    ),
    "iterator": (fn("x = next(it) #w\nf(x)", before="it = iter([1]); f = 0"), "it"),
    "iterator of another loader": (
        fn("f(next(it)) #w", before="import itertools\nit = itertools.cycle([1]); f = 0"),
        "it",
    ),
    "list not used up": (fn("for x in xs:\n f(x)", before="xs = [1]; f = 0"), ""),
    "global": (
        fn("global n\nn += 1 #w\nf(b / n)", before="f = 0", setup="n = 0")
        .replace("   global n\n", "")
        .replace("def run():", "def run():\n global n"),
        "n",
    ),
    "global changed by a function": (
        fn("count()\nif n > 3:\n f()", before="f = 0", setup="n = 0\ndef count():\n global n\n n += 1 #w"),
        "n",
    ),
    "global container changed by a function": (
        fn("f(note(b))", before="f = 0", setup="seen = []\ndef note(x):\n seen.append(x) #w\n return sum(seen)"),
        "seen",
    ),
    "nonlocal of a function inside": (
        fn("count()\nif n > 3:\n f()", before="n = f = 0\ndef count():\n nonlocal n\n n += 1 #w"),
        "n",
    ),
    "closure": (
        fn(
            "f(b / count())",
            before="f = 0",
            setup="def make():\n n = 0\n def count():\n  nonlocal n\n  n += 1 #w\n  return n\n return count\n"
            "count = make()",
        ),
        "n of count()",
    ),
    "function beside": (
        "def outer():\n n = 0\n def bump():\n  nonlocal n\n  n += 1 #w\n def run():\n  for step in steps():\n"
        "   with step as b:\n    bump()\n    if n > 3:\n     b.backward()\n run()\nouter()",
        "n",
    ),
    "function with a default": (
        fn("f(note(b))", before="f = 0", setup="def note(x, seen=[]):\n seen.append(x) #w\n return sum(seen)"),
        "note(seen=...)",
    ),
    "attribute of a function": (
        fn("f(note(b))", before="f = 0", setup="def note(x):\n note.n += 1 #w\n return note.n\nnote.n = 0"),
        "note.n",
    ),
    "attribute of an object": (
        fn("(b - t.baseline).backward()\nt.baseline = .9 * t.baseline + b #w", before="t = Trainer()", setup=TRAINER),
        "t.baseline",
    ),
    "attribute in a method": (
        TRAINER + " def train(self):\n  for step in steps():\n   with step as b:\n    (b - self.baseline).backward()\n"
        "    self.baseline = .9 * self.baseline + b.item() #w\nTrainer().train()",
        "self.baseline",
    ),
    "attribute in a method that is called": (
        TRAINER + " def update(self, x):\n  self.baseline = .9 * self.baseline + x #w\n  return x - self.baseline\n"
        "t = Trainer()\nfor step in steps():\n with step as b:\n  t.update(b).backward()",
        "t.baseline",
    ),
    "attribute that is made anew": (
        fn("t.last = b\nt.last.backward()", before="t = Trainer()", setup=TRAINER),
        "",
    ),
    "attribute that is only shown": (
        fn("t.history.append(b.item()) #w\nprint(t.history[-1])", before="t = Trainer()", setup=TRAINER),
        "~t.history",
    ),
    "attribute of an attribute": (
        fn(
            "t.inner.baseline += b #w\nf(t.inner.baseline)",
            before="t = Trainer(); t.inner = Trainer(); f = 0",
            setup=TRAINER,
        ),
        "t.inner.baseline",
    ),
    "attribute by another name": (
        fn("h = t.history\nh.append(b) #w\nf(h)", before="t = Trainer(); f = 0", setup=TRAINER),
        "t.history",
    ),
    "object in a dictionary": (
        fn("ts['a'].baseline += b #w\nf(ts['a'].baseline)", before="ts = {'a': Trainer()}; f = 0", setup=TRAINER),
        "ts['a'].baseline",
    ),
    "callback of a list": (
        fn("for t in ts:\n t.baseline += b #w\nf(ts[0].baseline)", before="ts = [Trainer()]; f = 0", setup=TRAINER),
        "ts[0].baseline",
    ),
    "attribute of a class": (
        fn("Trainer.count += 1 #w\nf(Trainer.count)", before="f = 0", setup=TRAINER + " count = 0"),
        "Trainer.count",
    ),
    "class method": (
        fn(
            "f(Trainer.bump())",
            before="f = 0",
            setup=TRAINER + " count = 0\n @classmethod\n def bump(cls):\n  cls.count += 1 #w\n  return cls.count",
        ),
        "Trainer.count",
    ),
    "object that is called": (
        fn(
            "f(t(b))",
            before="t = Trainer(); f = 0",
            setup=TRAINER + " def __call__(self, x):\n  self.baseline += x #w\n  return self.baseline",
        ),
        "t.baseline",
    ),
    "module of nn that counts": (
        fn(
            "f(m(b))",
            before="m = M(); f = 0",
            setup=MODULE,
        ),
        "m.n",
    ),
    "tracked module that counts": (
        fn(
            "f(m(b))",
            before="m = M(); f = 0",
            head="for step in steps(m):",
            setup=MODULE.replace(" #w", ""),
        ),
        "",
    ),
    "container given to a function": (
        fn(
            "f(note(seen, b))",
            before="seen = []; f = 0",
            setup="def note(into, x):\n into.append(x) #w\n return sum(into)",
        ),
        "seen",
    ),
    "container given to a function, shown": (
        fn("note(seen, b)", before="seen = []", setup="def note(into, x):\n into.append(x) #w\n print(sum(into))"),
        "~seen",
    ),
    "value given to a function": (
        fn("h = update(h, b) #w\nf(h)", before="h = f = 0", setup="def update(old, x):\n new = old + x\n return new"),
        "h",
    ),
    "step in a method": (
        TRAINER + " def one(self, step):\n  with step as b:\n   (b - self.baseline).backward()\n"
        "   self.baseline = b #w\n def train(self):\n  n = 0\n  for step in steps():\n   self.one(step)\n"
        "   n += 1 #w\n   print(n)\nTrainer().train()",
        "self.baseline|~n",
    ),
    "locals of a function that enters": (
        "def one(step):\n x = 0\n with step as b:\n  x += b\n  x.backward()\nfor step in steps():\n one(step)",
        "",
    ),
    "batch made above the block": (
        fn("f(x)", first="x, y = make(step.number)\nx = x + 1", before="f = abs", setup="def make(n):\n return n, n"),
        "",
    ),
    "count above the block": (fn("f(n)", first="n += 1 #w", before="n = f = 0"), "n"),
    "one of two blocks": (
        "h = f = 0\nfor step in steps():\n if step.number % 2:\n  with step as b:\n   f(b)\n else:\n  with step as b:\n"
        "   f(h)\n   h = b #w",
        "h",
    ),
    "count by enumerate": (fn("f(i)", before="f = 0", head="for i, step in enumerate(steps()): #w"), "i"),
    "count by enumerate, shown": (fn("print(i)", head="for i, step in enumerate(steps()): #w"), "~i"),
    "while and next": (
        "it = steps()\nn = 0\nwhile n < 9:\n step = next(it)\n with step as b:\n  b.backward()\n n += 1 #w",
        "n",
    ),
    "inside try": (
        fn("", head="for step in steps():")
        .replace("  with step as b:\n", "  try:\n   with step as b:\n    h += b #w\n    f(h)\n  finally:\n   pass\n")
        .replace(" for", " h = f = 0\n for"),
        "h",
    ),
    "lambda": (fn("f(lambda: h)\nh = b #w", before="h = f = 0"), "h"),
    "closure of an optimizer": (
        fn("def closure():\n nonlocal_ = h\n return nonlocal_\nf(closure)\nh = b #w", before="h = f = 0"),
        "h",
    ),
    "comprehension": (fn("f([x + h for x in b])\nh = b #w", before="h = f = 0"), "h"),
    "variable of a comprehension": (fn("f([h for h in b])\nh = b", before="f = 0"), ""),
    "match": (fn("match b:\n case 1:\n  h = 1 #w\nf(h)", before="h = f = 0"), "h"),
    "deleted": (fn("h = b\nf(h)\ndel h", before="f = 0"), ""),
    "timer": (fn("x = b", after="print(now() - start)\nstart = now() #w", before="start = 0; now = None"), "~start"),
    "recursive function": (
        fn("f(r(b))", before="f = 0", setup="n = 0\ndef r(x):\n global n\n n += 1 #w\n return x if n > 3 else r(x)"),
        "n",
    ),
    "partial": (
        fn(
            "f(p(b))",
            before="f = 0",
            setup="from functools import partial\nseen = []\ndef note(k, x):\n seen.append(x) #w\n return sum(seen)\n"
            "p = partial(note, 1)",
        ),
        "seen",
    ),
    "decorated by torch": (
        fn(
            "f(note(b))",
            before="f = 0",
            setup="import torch\nn = 0\n@torch.no_grad()\ndef note(x):\n global n\n n += 1 #w\n return n",
        ),
        "n",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_finds_what_is_carried(name: str, tmp_path: Path) -> None:
    source, expected = SHAPES[name]
    names = read_script(source, tmp_path)
    assert names is not None
    found = shown(names)
    assert sorted(found) == sorted(filter(None, expected.split("|")))
    marked = {number for number, line in enumerate(source.splitlines(), 1) if "#w" in line}
    assert not marked or set(found.values()) == marked


def test_a_batch_that_while_takes_into_an_attribute_is_set_in_the_block(tmp_path: Path) -> None:
    """The step has begun when its batch is stored."""
    source = (
        TRAINER + " def run(self):\n  left = steps()\n  while (step := next(left, None)) is not None:\n"
        "   if self.last is not None:\n    self.baseline += self.last.sum()\n"
        "   with step as self.last:\n    (self.last * self.baseline).backward()\nTrainer().run()"
    )
    names = read_script(source, tmp_path)
    assert names is not None
    found = {describe(one.place): one.late for one in names.found.values()}
    assert found == {"self.last": False, "self.baseline": True}


@pytest.mark.parametrize(
    ("kept", "shown_after"),
    [("[x for x in w if x > k]", []), ("{x: [k for y in w] for x in w}", []), ("[lambda: k for x in w]", ["k"])],
)
def test_what_comprehensions_read_in_the_loop_is_not_kept_for_code_after_it(
    kept: str, shown_after: list[str], tmp_path: Path
) -> None:
    names = read_script(fn(f"f({kept})", first="k = step.number // 2", before="w = [1, 2]"), tmp_path)
    assert names is not None
    assert names.shown_after == shown_after
