"""Names that code needs from what ran before it, against what the code reads when it runs."""

import ast
import builtins
import contextlib
from collections.abc import Iterator
from textwrap import indent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.training.carried.code.needed import needed_by

CASES = {
    "x = 1\nprint(x)": "print",
    "print(x)\nx = 1": "print x",
    "for x in y:\n z = x\nprint(z)": "print y z",
    "for x in y:\n x['lr'] *= 2": "y",
    "for x in y:\n pass\nprint(x)": "print x y",
    "if x:\n y = 1\nprint(y)": "print x y",
    "if x:\n y = 1\nelse:\n y = 2\nprint(y)": "print x",
    "x += 1": "x",
    "del x": "x",
    "a, (b, *c) = d\nprint(a, b, c)": "d print",
    "a[i].b = c": "a c i",
    "a = [x for x in y]": "y",
    "with suppress(E) as w:\n x = f(w)\nprint(x)": "E f print suppress x",
    "try:\n x = 1\nexcept E:\n pass\nprint(x)": "E print x",
    "x: int = 1\nprint(x)": "print",
    "x: int\nprint(x)": "int print x",
    "while (n := f()):\n print(n)": "f n print",
    "def f():\n return x\nx = 1": "x",
}


@pytest.mark.parametrize("code", CASES)
def test_the_names_that_code_needs(code: str) -> None:
    assert sorted(needed_by(ast.parse(code).body)) == sorted(CASES[code].split())


_VARIABLES = "abcd"


class Left(Exception):
    """A block is left early."""


class Swallows:
    """A context that ends its block early without an error, as `contextlib.suppress` does."""

    def __enter__(self) -> int:
        return 1

    def __exit__(self, *error: object) -> bool:
        return True


class Names(dict[str, Any]):
    """The variables of code that runs: notes those that it reads or deletes before they are set."""

    def __init__(self, decisions: Iterator[bool]) -> None:
        super().__init__()
        self.known = {"maybe": lambda: next(decisions, False), "leave": self.leave, "Left": Left, "Swallows": Swallows}
        self.needed: set[str] = set()
        self._deleted: set[str] = set()
        self._left = 40  # statements until a loop that never ends is left
        self._decisions = decisions

    def leave(self) -> None:
        """Raise an error now and then."""
        if next(self._decisions, False):
            raise Left

    def __getitem__(self, name: str) -> Any:
        if name not in _VARIABLES:
            return self.known.get(name) or getattr(builtins, name)
        if name not in self:
            if name in self._deleted:
                raise NameError(name)
            self.needed.add(name)
            self[name] = 0
        self._left -= 1
        if self._left < 0:
            raise StopIteration
        return super().__getitem__(name)

    def __delitem__(self, name: str) -> None:
        self[name]  # noted
        super().__delitem__(name)
        self._deleted.add(name)


_SIMPLE = (
    "{0} = {1}",
    "{0} += {1}",
    "{0}, {1} = {2}, 1",
    "{0}: int = {1}",
    "del {0}",
    "str({0}) if maybe() else ({1} := 2)",
    "leave()",
    "pass",
)
_BLOCKS = (
    "if maybe():\n{0}\nelse:\n{1}",
    "for {3} in range(maybe() + maybe()):\n{4}\n{0}\n{5}\nelse:\n{1}",
    "while maybe():\n{4}\n{0}\n{5}",
    "with Swallows() as {3}:\n{0}",
    "try:\n{0}\nexcept Left:\n{1}\nfinally:\n{2}",
)
_IN_LOOPS = (" pass", " if maybe(): break", " if maybe(): continue")


@st.composite
def programs(draw: st.DrawFn, depth: int = 2) -> str:
    """A few statements, with blocks in each other."""
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        names = [draw(st.sampled_from(_VARIABLES)) for _ in range(3)]
        if depth == 0 or draw(st.booleans()):
            lines.append(draw(st.sampled_from(_SIMPLE)).format(*names))
        else:
            blocks = [indent(draw(programs(depth - 1)), " ") for _ in range(3)]
            ends = [draw(st.sampled_from(_IN_LOOPS)) for _ in range(2)]
            lines.append(draw(st.sampled_from(_BLOCKS)).format(*blocks, names[0], *ends))
    return "\n".join(lines)


@given(programs(), st.lists(st.booleans(), max_size=30))
def test_code_reads_no_others_when_it_runs(code: str, decisions: list[bool]) -> None:
    names = Names(iter(decisions))
    with contextlib.suppress(Left, NameError, StopIteration):
        exec(compile(code, "code", "exec"), {}, names)
    assert names.needed <= needed_by(ast.parse(code).body)
