"""State by the step of its first change, by the code that changes it, and by the code that reads it.

Each way to hold state (`carried_holders.txt`, `carried_holders_late.txt`) is combined with a place in the step (a line
of the block, a hook of forward, backward or the optimizer, a call through a library, code between steps), with the
steps that change it (from the first, second, third or sixth on, or rarely), and with its readers. Each case trains
without relight; as a job that is left alone; with steps interrupted; with replacements of a rank that is lost at some
moment; and with a replacement of one that was interrupted before. All must end alike, or relight refuses, or doubts the
bits:

    python -m tests.training.carried_times --seed 0 --count 1000
"""

import argparse
import ast
import builtins
import gc
import itertools
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol

import numpy as np
import torch

from relight.errors import UsageError
from tests.training.carried_job import ABOVE, AT_BARRIER, Job, ScriptFiles, make_module, seed_step
from tests.training.carried_scripts import HOLDERS, IMPORTS, read_holders

STEPS = 10
LATE_HOLDERS = read_holders(Path(__file__).with_name("carried_holders_late.txt"))
HIDDEN_HOLDERS = read_holders(Path(__file__).with_name("carried_holders_hidden.txt"))
ALL_HOLDERS = HOLDERS | LATE_HOLDERS | HIDDEN_HOLDERS
# The steps that change the state.
SCHEDULES = {
    "always": "True",
    "from step 1": "step.number >= 1",
    "from step 2": "step.number >= 2",
    "from step 5": "step.number >= 5",
    "in step 1": "step.number == 1",
    "in step 6": "step.number == 6",
    "every 3rd": "step.number % 3 == 2",
    "every 7th": "step.number % 7 == 5",
}
# The code that runs `{act}`, and where it stands in the script. "head" is before the loop.
PLACES = {
    "line": ("before", "{act}()"),
    "eval": ("before", "eval('{act}()', globals() | {{'{act}': {act}}})"),
    "library": ("before", "torch.utils._pytree.tree_map(lambda _: {act}(), 1)"),
    "attribute": ("before", "vars(box)['{act}']()"),
    "forward pre-hook": ("head", "net.register_forward_pre_hook(lambda *_: {act}())"),
    "forward hook": ("head", "net.register_forward_hook(lambda *_: {act}())"),
    "backward hook": ("head", "net.weight.register_hook(lambda _: {act}())"),
    "backward hook of the module": ("head", "net.register_full_backward_hook(lambda *_: {act}())"),
    "accumulate hook": ("head", "net.weight.register_post_accumulate_grad_hook(lambda _: {act}())"),
    "optimizer pre-hook": ("head", "opt.register_step_pre_hook(lambda *_: {act}())"),
    "optimizer hook": ("head", "opt.register_step_post_hook(lambda *_: {act}())"),
    "after the write": ("written", "vars(box)['{act}']()"),
    "between steps": ("after", "if step.committed:\n vars(box)['{act}']()"),
    "next turn": ("above", "if step.number:\n vars(box)['{act}']()"),
}
# What reads it: `{read}` is its value.
READERS = {
    "line": ("block", "x = (x * 3 + int(b) + {read}) % 1009"),
    "late line": ("block", "if step.number >= 7:\n x = (x * 3 + {read}) % 1009"),
    "hook": ("head", "net.register_forward_pre_hook(lambda _, given: (given[0] + {read} % 1009,))"),
    "late hook": (
        "head",
        "net.register_forward_pre_hook(lambda _, given: (given[0] + {read} % 1009,) if step.number >= 7 else None)",
    ),
    "afterwards": ("head", ""),
}
FORMS = ("function", "function", "module")


@dataclass(frozen=True)
class Case:
    """One of the product."""

    holder: str
    place: str
    schedule: str
    reader: str
    form: str

    def source(self) -> str:
        """Return the script."""
        return script_of(self)

    def __str__(self) -> str:
        return f"{self.holder} / {self.place} / {self.schedule} / read by {self.reader} / {self.form}"


class Scripted(Protocol):
    """The parts of a case that `judge` needs."""

    @property
    def schedule(self) -> str: ...

    def source(self) -> str:
        """Return the script."""


def draw(seed: int, holders: tuple[str, ...] = ()) -> Case:
    """The case of a seed."""
    chance = random.Random(f"times/{seed}")
    holder = chance.choice(holders or (*HOLDERS, *list(LATE_HOLDERS | HIDDEN_HOLDERS) * 4))
    place, schedule, reader = (chance.choice(list(one)) for one in (PLACES, SCHEDULES, READERS))
    form = "function" if ALL_HOLDERS[holder].needs_function else chance.choice(FORMS)
    return Case(holder, place, schedule, reader, form)


def script_of(case: Case) -> str:
    """The source of a case."""
    holder = ALL_HOLDERS[case.holder].of(0)
    update = holder.update.replace("{v}", "(step.number + 1)")
    shared = sorted(_set_in(update) & ({"x"} | _set_in(holder.begin) | _set_in(holder.module)))
    known = _set_in(holder.begin) if case.form == "function" else ()
    words = [f"{'nonlocal' if n == 'x' or n in known else 'global'} {n}" for n in shared]
    if case.form == "module":
        words = [f"global {name}" for name in shared]
    act = "\n".join(
        ["def act():", *(f" {one}" for one in words), f" if {SCHEDULES[case.schedule]}:", indent(update, "  ")]
    )
    parts: dict[str, list[str]] = {"head": [], "above": [], "block": [], "before": [], "written": [], "after": []}
    for table, name in ((READERS, case.reader), (PLACES, case.place)):
        where, text = table[name]
        parts[where].append(text.format(read=f"({holder.read})", act="act"))
    lines = "\n".join
    block = [
        *parts["block"],
        "step.point(0)",
        *parts["before"],
        "step.point(1)",
        "net(torch.tensor([[float(x)]], dtype=torch.float64)).sum().backward()",
        "step.point(2)\nopt.step()\nstep.point(3)\nopt.zero_grad()",
        *parts["written"],
    ]
    body = lines([*parts["above"], "with step as b:", *(indent(one, " ") for one in block), *parts["after"]])
    end = f"(net.weight.tolist(), x, {holder.result or holder.read})"
    main = lines(
        [
            "x = 1",
            *([holder.begin] if holder.begin else []),
            act,
            "box = types.SimpleNamespace(act=act)",
            *parts["head"],
            f"for step in steps():\n{indent(body, ' ')}",
        ]
    )
    top = f"{IMPORTS}{holder.module}\n{_NET}\n"
    if case.form == "module":
        return f"{top}{main}\nresult = {end}\n"
    return f"{top}def main():\n{indent(main, ' ')}\n return {end}\nresult = main()\n"


_NET = """class Net(torch.nn.Linear):
 def __init__(self):
  super().__init__(1, 1, bias=False, dtype=torch.float64)
  self._own = types.SimpleNamespace(n=0)
net = Net()
net.weight.data.fill_(1.0)
opt = torch.optim.SGD(net.parameters(), lr=1.0)
hand_over(net, opt)"""
POINTS = 4
FAILURES = ("SILENT", "LOST")


def _set_in(source: str) -> set[str]:
    """The names that code binds, less those in functions and classes of its own."""
    found: set[str] = set()

    def look(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            return
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)):
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(node.id)
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        for one in ast.iter_child_nodes(node):
            look(one)

    look(ast.parse(source))
    return found - set(vars(builtins))


class PlainStep:
    """A step without relight."""

    committed = True

    def __init__(self, number: int) -> None:
        self.number = number
        seed_step(ABOVE + number)

    def __enter__(self) -> float:
        seed_step(self.number)
        return 1.0 + self.number

    def __exit__(self, *_: object) -> None: ...

    def point(self, number: int) -> None: ...


class Script:
    """A case that can be run again and again; each run has a module of its own."""

    def __init__(self, case: Scripted, directory: Path) -> None:
        source, self._path = case.source(), str(directory / f"script{next(_NUMBERS)}.py")
        Path(self._path).write_text(source)
        self._files = Path(self._path).with_suffix("")
        self._code = compile(source, self._path, "exec")

    def plain(self) -> Any:
        """The outcome without relight."""
        files, names = ScriptFiles(self._files), {"steps": lambda: map(PlainStep, range(STEPS))}
        return self._run({**names, "hand_over": lambda *_: None, "make_file": files.make})

    def run(self, job: Job) -> Any:
        """The outcome in a job. What a script draws before its loop is the same in every process."""
        try:
            return self._run(job.offers(self._files))
        finally:
            job.close()

    def _run(self, offers: dict[str, Any]) -> Any:
        seed_step(0)
        made = make_module(self._path, offers)
        printing, of_torch = np.get_printoptions(), dict(vars(torch._tensor_str.PRINT_OPTS))
        with warnings.catch_warnings():
            try:
                exec(self._code, vars(made))
            finally:
                np.set_printoptions(**printing)
                torch.set_printoptions(**of_torch)
        return vars(made)["result"]


_NUMBERS = itertools.count()


def judge(case: Scripted, seed: int, directory: Path, *, most: int = 3) -> str:
    """Return a verdict, after failures in `most` of the steps that a seed chooses.

    It is `equal`, `no script: ...`, `refused: ...`, `doubted: ...`, `LOST: ...`, or `SILENT: ...`.
    """
    script, chance = Script(case, directory), random.Random(f"faults/{seed}")
    interrupted, begins = (_steps_to_disturb(case, chance)[:most] for _ in range(2))
    try:
        expected = script.plain()
    except Exception as error:
        return f"no script: {type(error).__name__}: {error}"
    ends = {moment for step in begins for moment in (f"after step {step}", f"before step {step + 1}")}
    alone = Job(STEPS, recorded=ends | {f"before step {step}" for step in interrupted})
    try:
        found = script.run(alone)
    except UsageError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"LOST: left alone: {type(error).__name__}: {error}"
    doubts = [f"left alone: {alone.told[0]}"] if found != expected and alone.told else []
    if found != expected and not doubts:
        return f"SILENT: left alone: {found} instead of {expected}"

    def is_told(job: Job, name: str, told: list[str]) -> str:
        """Return "" if the job reports that its values may be others; else a sentence about the error or the values."""
        try:
            found = script.run(job)
        except UsageError as error:
            job.told.append(str(error))
            found = None
        except Exception as error:
            return f"LOST: {name}: {type(error).__name__}: {error}"
        if found != expected and not (told := [*told, *job.told]):
            return f"SILENT: {name}: {found} instead of {expected}"
        doubts.extend([f"{name}: {told[0]}"] if found != expected else [])
        return ""

    for number in interrupted:
        place = chance.choice((AT_BARRIER, *range(POINTS)))
        later = _two_of(chance, number)
        again, name = Job(STEPS, fails_in=(number, place), recorded=later), f"interrupted in step {number} at {place}"
        if silent := is_told(again, name, []):
            return silent
        # The same failure where the rank was lost, and later that rank or another is lost.
        first = next(moment for moment in alone.moments if moment.place == f"before step {number}")
        replacement = Job(STEPS, lost=first, recorded=later)
        if silent := is_told(replacement, f"lost in step {number}", [*alone.told, *again.told]):
            return silent
        own = {moment.place: moment for moment in replacement.moments}
        for lost in again.moments:
            of_rank = chance.choice((lost, own.get(lost.place, lost)))
            third = Job(STEPS, lost=replace(lost, private=of_rank.private, told=lost.told or of_rank.told))
            if silent := is_told(third, f"{name}, lost {lost.place}", [*again.told, *replacement.told]):
                return silent
    for lost in alone.moments:
        if lost.place in ends and (silent := is_told(Job(STEPS, lost=lost), f"lost {lost.place}", alone.told)):
            return silent
    return f"doubted: {doubts[0]}" if doubts else "equal"


def _two_of(chance: random.Random, number: int) -> list[str]:
    """Two moments after a step begins, or the only one."""
    ends = [f"after step {step}" for step in range(number, STEPS)]
    moments = [*ends, *(f"before step {step}" for step in range(number + 1, STEPS))]
    return chance.sample(moments, min(2, len(moments)))


def _steps_to_disturb(case: Scripted, chance: random.Random) -> list[int]:
    """The first step that changes the state, and two more."""
    changes = [n for n in range(STEPS) if eval(SCHEDULES[case.schedule], {"step": PlainStep(n)})]
    return [changes[0], chance.choice(changes), chance.randrange(STEPS)]


def _seeds(first: int, count: int, minutes: float | None) -> Iterator[int]:
    end = time.monotonic() + 60 * (minutes or 0)
    for seed in itertools.count(first) if minutes else range(first, first + count):
        yield seed
        if minutes and time.monotonic() > end:
            return


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() // 1000, help="the first one; default: a new one")
    parser.add_argument("--count", type=int, default=1000, help="cases")
    parser.add_argument("--minutes", type=float, help="as many cases as that takes, instead of a number")
    parser.add_argument("--holder", action="append", default=[], help="only cases with this one, or another so given")
    parser.add_argument("--show", action="store_true", help="the scripts")
    parser.add_argument("--quiet", action="store_true", help="print only what is silent")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    gc.collect()
    gc.freeze()  # what is looked at after each case is what it left
    with tempfile.TemporaryDirectory() as directory:
        for seed in _seeds(options.seed, options.count, options.minutes):
            case = draw(seed, tuple(options.holder))
            verdict = judge(case, seed, Path(directory))
            gc.collect()  # scripts are cycles, some of many megabytes
            kind = verdict.partition(":")[0]
            counts[kind] += 1
            if options.show:
                print(script_of(case))
            if kind in FAILURES or not (kind == "equal" or options.quiet):
                print(f"{seed} {case}: {verdict}", flush=True)
    print(f"seed {options.seed}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    sys.exit(any(counts[kind] for kind in FAILURES))


if __name__ == "__main__":
    main()
