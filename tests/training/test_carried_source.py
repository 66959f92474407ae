"""The code of a script before its first step: loops around the loop of steps, gradients carried by hand."""

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

import pytest

from relight.training.carried.code.iteration import iteration_of
from relight.training.carried.code.misuse import (
    accumulates_by_hand,
    loop_after,
    loops_around,
    returns_from,
    takes_steps_in,
)
from relight.training.carried.code.source import frame_of_block, is_user_frame, lines_of


class Entered:
    """Keeps the name of the function whose block is entered, or left."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __enter__(self) -> None:
        self.found.append(frame_of_block(sys._getframe(1)).f_code.co_name)

    def __exit__(self, *_: object) -> None:
        self.found.append(frame_of_block(sys._getframe(1)).f_code.co_name)


def test_the_block_of_a_stack_is_that_of_the_function_which_enters_it() -> None:
    entered = Entered()
    with contextlib.ExitStack() as stack:
        stack.enter_context(entered)
    assert entered.found == [test_the_block_of_a_stack_is_that_of_the_function_which_enters_it.__name__] * 2


def test_code_from_a_text_is_the_scripts_own_if_its_module_is() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "sys": sys}
    exec("frame = sys._getframe()", names)
    assert is_user_frame(names["frame"])
    exec("frame = sys._getframe()", names := {"__name__": "json.decoder", "sys": sys})
    assert not is_user_frame(names["frame"])


class Reached(Exception):
    """The first step was entered."""


class Step:
    """Keeps the frame that enters it."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self.seen = seen
        self.number = 0

    def __enter__(self) -> Any:
        frame = sys._getframe(1)
        self.seen["by hand"] = accumulates_by_hand(frame, lambda node: "opt" in ast.unparse(node))
        self.seen["returns"] = returns_from(frame)
        self.seen["iteration"] = iteration_of(frame, {})
        raise Reached

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def read(source: str, path: Path) -> dict[str, Any]:
    """Run a script until it enters its first step; `Training()` stands for relight's."""
    path.write_text(source)
    seen: dict[str, Any] = {}
    built: list[tuple[str, int]] = []

    def steps(until: int = 1) -> Iterator[Step]:
        frame: FrameType = sys._getframe(1)
        seen["around"] = loops_around(frame, built)
        seen["after"] = loop_after(frame)
        return offered(lines_of(frame))

    def offered(called_at: list[tuple[str, int]]) -> Iterator[Step]:
        seen["takes"] = takes_steps_in(sys._getframe(1), called_at)
        yield Step(seen)

    def make() -> None:
        built.extend(lines_of(sys._getframe(1)))

    job = SimpleNamespace(steps=steps)
    names: dict[str, Any] = {"__name__": "script", "steps": steps, "job": job, "Training": make}
    with pytest.raises(Reached):
        exec(compile(source, str(path), "exec"), names)
    return seen


LOOPS = {
    "none": ("for step in steps():\n with step as b:\n  pass", None),
    "epochs": ("for epoch in range(3):\n for step in steps():\n  with step as b:\n   pass", 1),
    "epochs, and another loop": (
        "for a in range(3):\n for e in range(2):\n  for step in steps():\n   with step as b:\n    pass",
        2,
    ),
    "epochs around a function": (
        "def train():\n for step in steps():\n  with step as b:\n   pass\nfor epoch in range(3):\n train()",
        5,
    ),
    "while": ("while True:\n for step in steps():\n  with step as b:\n   pass\n break", 1),
    "in a function": ("def train():\n for step in steps():\n  with step as b:\n   pass\ntrain()", None),
    "after a loop": ("for i in range(3):\n pass\nfor step in steps():\n with step as b:\n  pass", None),
    "in the head of a loop": ("for x in [1]:\n pass\nelse:\n for step in steps():\n  with step as b:\n   pass", None),
    "a loop that makes a new job": (
        "for seed in range(1):\n Training()\n for step in steps():\n  with step as b:\n   pass",
        None,
    ),
    "a loop that makes a new job again": (
        "n = 3\nfor seed in range(n):\n Training()\n for step in steps():\n  with step as b:\n   pass",
        2,
    ),
    "a loop that may try again": (
        "for seed in range(3):\n Training()\n for step in steps():\n  with step as b:\n   pass\n if seed:\n  break",
        None,
    ),
    "a loop that trains in one turn": (
        "def train(k):\n if not k:\n  return\n Training()\n for step in steps():\n  with step as b:\n   pass\n"
        "for k in (1, 0):\n train(k)",
        None,
    ),
    "a loop of another length": (
        "def seeds():\n yield 1\nfor seed in seeds():\n Training()\n for step in steps():\n  with step as b:\n   pass",
        None,
    ),
    "a loop around a function that makes a new job": (
        "def train():\n Training()\n for step in steps():\n  with step as b:\n   pass\n"
        "for n, f in enumerate('ab'):\n train()",
        6,
    ),
    "made outside, in a function": (
        "def train():\n for step in steps():\n  with step as b:\n   pass\ndef main():\n Training()\n"
        " for epoch in range(3):\n  train()\nmain()",
        7,
    ),
    "kept in a name": ("it = steps()\nfor step in it:\n with step as b:\n  pass", None),
    "next in a loop": ("it = steps()\nwhile True:\n step = next(it)\n with step as b:\n  pass", None),
    "enumerate": ("for i, step in enumerate(steps()):\n with step as b:\n  pass", None),
    "enumerate inside": ("for e in [1]:\n for i, step in enumerate(steps()):\n  with step as b:\n   pass", 1),
    "in one line": ("def train(s):\n with s as b:\n  pass\nfor s in steps(): train(s)", None),
    "epochs in one line": ("def train(s):\n with s as b:\n  pass\nfor e in [1]: n = e; [train(s) for s in steps()]", 4),
    "passed on in one line": ("def each():\n for s in steps(): yield s\nfor s in each():\n with s as b:\n  pass", None),
    "a library's loop": ("list(map(lambda _: [s.__enter__() for s in steps()], [1]))", None),
}


@pytest.mark.parametrize("name", LOOPS)
def test_names_loops_around_the_loop_of_steps(name: str, tmp_path: Path) -> None:
    source, line = LOOPS[name]
    around = read(source, tmp_path / "script.py")["around"]
    assert around == (None if line is None else f"script.py:{line}")


_LOOP = "for step in job.steps(until=3):\n with step as b:\n  pass\n"
_FUNCTION = "def {}():\n for step in job.steps(until=3):\n  with step as b:\n   pass\n"
AFTER = {
    "one loop": (_LOOP, None),
    "two loops": (_LOOP + _LOOP, 4),
    "two loops in a function": ("def main():\n" + indent(_LOOP + "x = 1\n" + _LOOP, " ") + "main()", 6),
    "one function, called twice": (_FUNCTION.format("fit") + "fit()\nfit()", 6),
    "two functions": (_FUNCTION.format("train") + _FUNCTION.format("tune") + "a = train()\nb = tune()", 10),
    "a function that is called later": (_LOOP + "def f():\n pass\nf()", None),
    "a function that is not called": (_LOOP + _FUNCTION.format("tune"), None),
    "another branch": ("if True:\n" + indent(_LOOP, " ") + "else:\n" + indent(_LOOP, " "), None),
    "a branch, and a loop after it": ("if True:\n" + indent(_LOOP, " ") + _LOOP, 5),
    "in a branch later": (_LOOP + "if True:\n" + indent(_LOOP, " "), None),
    "after the script's end": ("def main():\n" + indent(_LOOP + "return\n" + _LOOP, " ") + "main()", None),
    "a branch that may return": ("def main():\n" + indent(_LOOP + "if x:\n return\n" + _LOOP, " ") + "main()", None),
    "a loop that may return": ("def main():\n" + indent(_LOOP + "  return\n" + _LOOP, " ") + "main()", None),
    "a function between them that returns": (_LOOP + "def f():\n return 1\n" + _LOOP, 6),
    "steps of another thing": (_LOOP + "for x in env.steps(3):\n pass", None),
}


@pytest.mark.parametrize("name", AFTER)
def test_names_a_second_loop_of_steps(name: str, tmp_path: Path) -> None:
    source, line = AFTER[name]
    after = read(source, tmp_path / "script.py")["after"]
    assert after == (None if line is None else f"script.py:{line}")


TAKEN = {
    "for": (LOOPS["none"][0], None),
    "a new job in each turn": (LOOPS["a loop that makes a new job"][0], None),
    "a function": (LOOPS["in a function"][0], None),
    "while": (LOOPS["next in a loop"][0], None),
    "counted": ("it = steps()\nfor i in range(9):\n with next(it) as b:\n  pass", 2),
    "data": ("it = steps()\nfor e in [1]:\n for x in [2, 3]:\n  step = next(it)\n  with step as b:\n   pass", 3),
    "passed on in one line": (
        "def each(it):\n for s in it: yield s; print(s)\nfor s in each(steps()):\n with s as b:\n  pass",
        None,
    ),
    "counted in one line": (
        "def train(s):\n with s as b:\n  pass\nit = steps()\nfor i in range(9): s = next(it); train(s)",
        5,
    ),
    "some steps of an epoch": (
        "from itertools import islice\nit = steps()\n"
        "for e in [1]:\n for step in islice(it, 2):\n  with step as b:\n   pass",
        4,
    ),
    "beside a range": ("for i, step in zip(range(9), steps()):\n with step as b:\n  pass", 1),
    "beside data": ("it = zip(steps(), [1, 2])\nfor step, x in it:\n with step as b:\n  pass", 2),
    "enumerate": (LOOPS["enumerate"][0], None),
    "another loop over the same": ("it = steps()\nfor e in [1]:\n for step in it:\n  with step as b:\n   break", 2),
}


@pytest.mark.parametrize("name", TAKEN)
def test_names_loops_that_take_steps_one_by_one(name: str, tmp_path: Path) -> None:
    source, line = TAKEN[name]
    assert read(source, tmp_path / "script.py")["takes"] == (None if line is None else f"script.py:{line}")


_STEP = "def train(s):\n with s as b:\n  {}\n{}for s in steps(): loss = train(s)"
RETURNS = {
    "a value": (_STEP.format("x = 1\n  return x", ""), 4),
    "several values, in a branch": (_STEP.format("if b: return b, 1\n  pass", " return 0\n"), 3),
    "a constant": (_STEP.format("x = 1\n  return True", ""), 4),
    "after the block": (_STEP.format("x = 1", " return x\n"), None),
    "no value": (_STEP.format("if b: return\n  return None", ""), None),
    "of a function inside": (_STEP.format("f = lambda: b\n  def g(): return b", " return f\n"), None),
    "in the function of the loop": (
        "def fit():\n for s in steps():\n  with s as b:\n   if b: return b\n return 0\nfit()",
        None,
    ),
}


@pytest.mark.parametrize("name", RETURNS)
def test_names_a_value_that_an_interrupted_block_would_not_return(name: str, tmp_path: Path) -> None:
    source, line = RETURNS[name]
    assert read(source, tmp_path / "script.py")["returns"] == (None if line is None else f"script.py:{line}")


def block(*lines: str) -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"opt = loss = k = n = None\nfor step in steps():\n with step as b:\n{body}"


BY_HAND = {
    "every fourth step": (
        block("loss.backward()", "if (step.number + 1) % 4 == 0:", " opt.step()", " opt.zero_grad()"),
        5,
    ),
    "counted by hand": (block("loss.backward()", "n += 1", "if n % k == 0:", " opt.step()"), 6),
    "not modulo": (block("loss.backward()", "if not (n % k):", " opt.step()"), 5),
    "every step": (block("loss.backward()", "opt.step()"), None),
    "critic and generator": (
        block("opt.zero_grad()", "loss.backward()", "opt.step()", "if n % 5 == 0:", " loss.backward()", " opt.step()"),
        None,
    ),
    "gradients of each step alone": (
        block("opt.zero_grad()", "loss.backward()", "if n % 5 == 0:", " opt.step()"),
        None,
    ),
    "no counting": (block("loss.backward()", "if loss:", " opt.step()"), None),
    "scheduler": (block("loss.backward()", "opt.step()", "if n % 5 == 0:", " scheduler.step()"), None),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_names_gradients_that_are_accumulated_by_hand(name: str, tmp_path: Path) -> None:
    source, line = BY_HAND[name]
    found = read(source, tmp_path / "script.py")["by hand"]
    assert found == (None if line is None else f"script.py:{line}")


def test_tells_statements_of_one_line_apart(tmp_path: Path) -> None:
    source = "def train(s):\n with s as b: loss = 1; n = 2\nfor s in steps(): n = 0; train(s); m = n"
    iteration = read(source, tmp_path / "script.py")["iteration"]
    said = [ast.unparse(statement) for piece in iteration.pieces for statement in piece.statements]
    assert said == ["s = None", "n = 0", "with s as b:\n    loss = 1\n    n = 2", "train(s)", "m = n"]
    assert iteration.computes_above


@pytest.mark.parametrize(("statement", "computes"), [("global n", False), ("'text'", False), ("n = 1", True)])
def test_declarations_above_the_block_compute_nothing(statement: str, computes: bool, tmp_path: Path) -> None:
    source = f"def turn(s):\n {statement}\n with s as b: n = 2\nfor s in steps(): turn(s)"
    assert read(source, tmp_path / "script.py")["iteration"].computes_above == computes
    source = f"for s in steps():\n {statement}\n with s as b: n = 2"
    assert read(source, tmp_path / "other.py")["iteration"].computes_above == computes


def test_an_attribute_that_stands_for_the_step_is_not_counted(tmp_path: Path) -> None:
    setup = "from types import SimpleNamespace\nkept, n = SimpleNamespace(), 0\n"
    iteration = read(f"{setup}for kept.s in steps():\n with kept.s as b: n = 2", tmp_path / "script.py")["iteration"]
    assert not iteration.counted
    assert not iteration.computes_above
    source = f"{setup}for n, kept.s in enumerate(steps()):\n with kept.s as b: pass"
    assert read(source, tmp_path / "other.py")["iteration"].counted == {"n"}


@pytest.mark.parametrize(
    ("head", "computes"),
    [
        ("for step in steps():\n with step as b:", False),
        ("for n, step in enumerate(job.steps()):\n with step as b:", False),
        ("for step in job.steps():\n with step as b, memoryview(b''):", False),
        ("for step in job.steps():\n with memoryview(b''), step as b:", True),
        ("for step in job.steps():\n if step.number:\n  pass\n with step as b:", True),
        ("for step in map(lambda s: s, job.steps()):\n with step as b:", True),
        ("found = job.steps()\nfor step in found:\n with step as b:", True),
        ("found = job.steps()\nwhile step := next(found):\n with step as b:", False),
    ],
)
def test_tells_whether_code_runs_before_the_block(head: str, computes: bool, tmp_path: Path) -> None:
    iteration = read(f"{head}\n  pass", tmp_path / "script.py")["iteration"]
    assert iteration.computes_above is computes


def test_code_without_a_source_has_no_iteration() -> None:
    seen: dict[str, Any] = {}
    source = "for step in steps:\n with step as b:\n  pass"
    with pytest.raises(Reached):
        exec(compile(source, "<string>", "exec"), {"steps": [Step(seen)]})
    assert seen["iteration"] is None
