"""Scripts composed at random of ways in which Python code holds state from step to step.

Each is run undisturbed, with a step that is interrupted at a random place and repeated, and with a replacement that
goes on at a random version. All must end alike, or the script is refused, or the replacement's bits are doubted:

    python -m tests.training.carried_scripts --seeds 0..10000
"""

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from relight.errors import UsageError
from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import STEPS, Loop, run_script


@dataclass(frozen=True)
class Holder:
    """One way to hold a number; see `carried_holders.txt`."""

    module: str = ""
    begin: str = ""
    read: str = ""
    update: str = ""
    result: str = ""
    needs_function: bool = False  # the loop may not be at the module's level

    def of(self, number: int) -> "Holder":
        """With a number in its names."""
        texts = (self.module, self.begin, self.read, self.update, self.result)
        module, begin, read, update, result = (text.replace("{i}", str(number)) for text in texts)
        return Holder(module, begin, read, update, result)


def read_holders(path: Path) -> dict[str, Holder]:
    """Those of a file, by their names."""
    holders = {}
    for text in path.read_text().split("\n=== ")[1:]:
        name, *parts = re.split(r"\n--- (\w+)\n", text.rstrip("\n"))
        pieces = dict(zip(parts[0::2], parts[1::2], strict=True))
        plain = name.removesuffix(" (in a function)")
        holders[plain] = Holder(**pieces, needs_function=plain != name)
    return holders


HOLDERS = read_holders(Path(__file__).with_name("carried_holders.txt"))

IMPORTS = (
    "import bz2, collections, contextlib, copy, dataclasses, datetime, enum, fractions, functools, hashlib, heapq\n"
    "import itertools, logging, math, operator, os, pathlib, queue, random, sqlite3, torch, types, warnings, zlib\n"
    "import numpy as np\n"
)
# Where an update stands: `{}` is the statement.
WRAPPED = (
    "{}",
    "{}",
    "{}",
    "if step.number % 2:\n{1}",
    "if step.number >= 2:\n{1}",
    "if step.number >= 4:\n{1}",
    "if step.number == 5:\n{1}",
    "if x % 3 == 0:\n{1}",
    "for _ in range(2):\n{1}",
    "try:\n{1}\nfinally:\n pass",
    "try:\n if step.number % 2:\n  raise ValueError\nexcept ValueError:\n{1}",
    "match step.number % 3:\n case 0 | 1:\n{2}\n case _:\n  pass",
    "with contextlib.nullcontext():\n{1}",
    "left = 2\nwhile left > 0:\n left -= 1\n{1}",
)
MANY_STEPS = 10
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
    usable = [name for name, one in HOLDERS.items() if form != "module" or not one.needs_function]
    names = draw.sample(usable, min(len(usable), draw.randint(1, 3)))
    head: list[str] = []
    begin: list[str] = []
    block: list[str] = []
    above: list[str] = []
    after: list[str] = []
    results = ["x"]
    for number, name in enumerate(names):
        holder, where = HOLDERS[name].of(number), draw.choice((block, block, block, block, block, above, after))
        adds = draw.choice(("step.number + 1", "step.number * 3 + x % 5", "2", *(["int(b)"] if where is block else [])))
        begin.append(holder.begin)
        head.append(holder.module)
        results.append(f"({holder.result or holder.read})")
        read = f"x = (x * 3 + int(b) + {holder.read}) % 1009"
        update = _wrap(draw.choice(WRAPPED), holder.update.replace("{v}", adds))
        if where is after:
            update = f"if step.committed:\n{indent(update, ' ')}"
        pair = [(block, read), (where, update)]
        if draw.random() < 0.2:
            pair = pair[1:]  # it is read after the loop only
        elif draw.random() < 0.5:
            pair.reverse()
        for to, statement in pair:
            to.insert(draw.randrange(len(to) + 1) if draw.random() < 0.3 else len(to), statement)
    parts = (form, *names)
    if draw.random() < 0.3:
        head.append("opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)")
        block.insert(draw.randrange(len(block) + 1), "step.write()\nopt.step()")
    block = [f"{statement}\nstep.point({number}, x)" for number, statement in enumerate(block)] or ["step.point(0, x)"]
    source = _assemble(form, head, begin, above, block, after, results)
    if form != "module" and draw.random() < 0.15:
        source, parts = _as_coroutine(source), (*parts, "in a coroutine")
    return Script(source, parts)


def _as_coroutine(source: str) -> str:
    """The loop's function, and those that call it, as coroutines."""
    source = source.replace("return train()", "return await train()")
    source = re.sub(r"(?m)^( *)def (main|train)\(", r"\1async def \2(", source)
    return re.sub(r"(?m)^result = (.*)$", r"import asyncio\nresult = asyncio.run(\1)", source)


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
    until = STEPS if seed % 4 else MANY_STEPS  # so many that values are compared again
    first = Loop(until=until)
    first.risks = []
    try:
        expected = run_script(script.source, first, directory)
    except UsageError as error:
        return f"refused: {error}"
    except NameError:
        return "no script: it reads a name that has no value yet"
    for number in range(until):
        points = script.source.count("step.point(")
        again = Loop(until=until, fails_at=number, fails_in=draw.randrange(points))
        found = run_script(script.source, again, directory)
        if found != expected and not (again.doubt or again.said):
            return f"SILENT: interrupted in step {number}: {found} instead of {expected}"
    doubts = []
    trees = [*enumerate(first.kept[: until + 1]), *first.kept_early.items()]
    for version, tree in trees:
        again = Loop(until=until, begins_at=version, tree=decode_tree(tree))
        found = run_script(script.source, again, directory)
        if found == expected:
            continue
        doubt = again.doubt or first.doubt or first.risks[version] or "; ".join({*first.said, *again.said})
        if not doubt:
            survivor = Loop(until=until, recovers_at=version)
            run_script(script.source, survivor, directory)
            doubt = survivor.doubt or ""
        if not doubt:
            return f"SILENT: replaced at version {version}: {found} instead of {expected}"
        doubts.append(doubt)
    return f"doubted: {doubts[0]}" if doubts else "equal"


def _seeds(minutes: float) -> Iterator[int]:
    end, first = time.monotonic() + 60 * minutes, time.time_ns() // 1000
    while time.monotonic() < end:
        yield first
        first += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0..999", help="A..B, both included, or one")
    parser.add_argument("--minutes", type=float, help="new seeds, for so long")
    parser.add_argument("--show", action="store_true", help="the scripts")
    options = parser.parse_args()
    low, _, high = options.seeds.partition("..")
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        for seed in _seeds(options.minutes) if options.minutes else range(int(low), int(high or low) + 1):
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
