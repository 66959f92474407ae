"""Values that no variable holds, and that code changes which relight cannot read: undone, carried, or told."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from relight.training.carried.finding.spots.outside import Settings
from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import Loop, run_script

SCRIPT = """
import collections, contextvars, decimal, enum, itertools, os, pathlib, sqlite3, sys, types, weakref
import numpy as np
import torch

class Thing:
    def __init__(self, value=0.0):
        self.value = value

class Kind(enum.Enum):
    A = [1]
    B = 2

class Store(sqlite3.Connection):
    def __init__(self, *_, **__):
        super().__init__(":memory:", isolation_level=None)
        self.row_factory = lambda cursor, row: {each[0]: value for each, value in zip(cursor.description, row)}

def database(count, factory=sqlite3.Connection):
    found = sqlite3.connect(":memory:", isolation_level=None, factory=factory)
    found.execute("CREATE TABLE seen (value TEXT)")
    found.execute("INSERT INTO seen VALUES (?)", ("0" * count,))
    return found

def file():
    path = pathlib.Path(__file__).with_name("state.json")
    path.write_text("1")
    return path

def run():
    made = MAKE
    def act(step):
        CHANGE
    acts = [act]
    for step in steps():
        with step as value:
            if step.number in (FIRST, 30):
                eval("acts[0](1)", {"acts": acts})
            step.end()
    return repr(SHOWN)
result = run()
"""


@dataclass(frozen=True)
class Case:
    """Statements of a script, and a word that names what they change."""

    made: str
    change: str
    shown: str
    word: str


CASES = {
    "environment": Case(
        "os.environ.update(TEMPERATURE='1')",
        "os.environ['TEMPERATURE'] += '1'",
        "os.environ['TEMPERATURE']",
        "os.environ",
    ),
    "new in the environment": Case(
        "os.environ.pop('TEMPERATURE', None)",
        "os.environ['TEMPERATURE'] = '1'",
        "os.environ.get('TEMPERATURE')",
        "os.environ",
    ),
    "gone from the environment": Case(
        "os.environ.update(TEMPERATURE='1')",
        "os.environ.pop('TEMPERATURE', None)",
        "os.environ.get('TEMPERATURE')",
        "os.environ",
    ),
    "decimal": Case(
        "setattr(decimal.getcontext(), 'prec', 6)",
        "decimal.getcontext().prec += 1",
        "decimal.getcontext().prec",
        "decimal",
    ),
    "traps of decimal": Case(
        "decimal.setcontext(decimal.Context())",
        "decimal.getcontext().traps[decimal.Inexact] = True",
        "decimal.getcontext().traps[decimal.Inexact]",
        "decimal",
    ),
    "errors of NumPy": Case("np.seterr(over='warn')", "np.seterr(over='ignore')", "np.geterr()", "numpy"),
    "recursion limit": Case(
        "sys.setrecursionlimit(1500)",
        "sys.setrecursionlimit(sys.getrecursionlimit() + 1)",
        "sys.getrecursionlimit()",
        "recursion",
    ),
    "autocast": Case(
        "torch.set_autocast_enabled('cpu', False)",
        "torch.set_autocast_enabled('cpu', True)",
        "torch.is_autocast_enabled('cpu')",
        "autocast",
    ),
    "type of autocast": Case(
        "torch.set_autocast_dtype('cpu', torch.bfloat16)",
        "torch.set_autocast_dtype('cpu', torch.float16)",
        "torch.get_autocast_dtype('cpu')",
        "autocast",
    ),
    "default device": Case(
        "torch.set_default_device(None)",
        "torch.set_default_device('meta')",
        "torch.get_default_device()",
        "device",
    ),
    "threads": Case("torch.set_num_threads(1)", "torch.set_num_threads(2)", "torch.get_num_threads()", "threads"),
    "context variable": Case(
        "contextvars.ContextVar('made', default=1.0)", "made.set(made.get() + 1)", "made.get()", "made"
    ),
    "context variable without a value": Case(
        "contextvars.ContextVar('made')", "made.set(made.get(1.0) + 1)", "made.get(None)", "made"
    ),
    "object in a context variable": Case(
        "contextvars.ContextVar('made', default=Thing())", "made.get().value += 1", "made.get().value", "made"
    ),
    "context variable in an object": Case(
        "Thing(contextvars.ContextVar('made', default=1.0))", "made.value.set(2.0)", "made.value.get()", "made"
    ),
    "database": Case(
        "database(2)",
        "made.execute(\"UPDATE seen SET value = value || '1'\")",
        "made.execute('SELECT value FROM seen').fetchall()",
        "made",
    ),
    "database of a class whose rows are mappings": Case(
        "database(2, Store)",
        "made.execute(\"UPDATE seen SET value = value || '1'\")",
        "made.execute('SELECT value FROM seen').fetchall()",
        "made",
    ),
    "database that is being read": Case(
        "database(2)",
        "made.execute(\"UPDATE seen SET value = value || '1'\");"
        " Thing.cursor = made.execute('SELECT value FROM seen UNION ALL SELECT 1 UNION ALL SELECT 2');"
        " next(Thing.cursor)",
        "made.execute('SELECT value FROM seen').fetchall()",
        "made",
    ),
    "large database": Case(
        "database(2**21)",
        "made.execute(\"UPDATE seen SET value = value || '1'\")",
        "made.execute('SELECT length(value) FROM seen').fetchall()",
        "made",
    ),
    "weak keys": Case(
        "Thing(weakref.WeakKeyDictionary({Thing: 1.0}))", "made.value[Thing] += 1", "made.value[Thing]", "made"
    ),
    "print options of NumPy": Case(
        "np.set_printoptions(precision=3)",
        "np.set_printoptions(precision=5)",
        "np.get_printoptions()['precision']",
        "numpy",
    ),
    "print options of torch": Case(
        "torch.set_printoptions(precision=3)",
        "torch.set_printoptions(precision=5)",
        "repr(torch.ones(1) / 3)",
        "torch",
    ),
    "counter": Case("itertools.count(1)", "next(made)", "made", "made"),
    "counter bound to a function": Case("itertools.count(2.5, 3).__next__", "made()", "made.__self__", "made"),
    "counter of a class": Case(
        "type('Own', (Thing,), {'ids': itertools.count()})", "next(made.ids)", "made.ids", "made"
    ),
    "counter of a dictionary": Case(
        "collections.defaultdict(itertools.count(1).__next__)",
        "made.default_factory()",
        "made.default_factory.__self__",
        "made",
    ),
    "value of a member": Case("Kind", "made.A.value.append(1)", "made.A.value", "A._value_"),
    "attribute of a member": Case("Kind", "setattr(made.B, 'late', 1)", "vars(made.B).get('late')", "B.late"),
    "file": Case(
        "file()",
        "[made.write_text(str(int(made.read_text()) + 1)) for _ in range(2)]",
        "made.read_text()",
        "state.json",
    ),
    "module": Case(
        "sys.modules.pop('made_late', None)",
        "sys.modules['made_late'] = types.ModuleType('made_late')",
        "'made_late' in sys.modules",
        "made_late",
    ),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Settings of this process go back."""
    settings = Settings()
    before = {name: spot.get() for name, spot in settings.spots.items()}
    yield
    for name, spot in settings.spots.items():
        if spot.get() != before[name]:
            spot.set(before[name])


def script(case: Case, first: int) -> str:
    text = SCRIPT.replace("MAKE", case.made).replace("CHANGE", case.change).replace("SHOWN", case.shown)
    return text.replace("FIRST", str(first))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("at", [1, 4])
def test_what_an_undone_step_changed_is_undone_or_told(case: Case, at: int, tmp_path: Path) -> None:
    whole, loop = Loop(until=6), Loop(until=6, fails_at=at)
    expected = run_script(script(case, at), whole, tmp_path)
    assert whole.doubt is None
    if run_script(script(case, at), loop, tmp_path) != expected:
        assert case.word in str(loop.doubt)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("at", [1, 5])
def test_a_replacement_gets_it_or_that_is_told(case: Case, at: int, tmp_path: Path) -> None:
    first = Loop(until=8)
    first.risks = []
    expected = run_script(script(case, at), first, tmp_path)
    second = Loop(until=8, begins_at=at + 1, tree=decode_tree(first.kept[at + 1]))
    if run_script(script(case, at), second, tmp_path) != expected:
        told = [first.risks[at + 1], str(second.doubt), *first.said]
        assert any(case.word in text for text in told)


def test_a_file_that_steps_only_read_or_write_is_no_doubt(tmp_path: Path) -> None:
    case = Case("file()", "open(__file__ + '.log', 'a').write(made.read_text())", "made.read_text()", "")
    loop = Loop(until=6, fails_at=4)
    run_script(script(case, 4), loop, tmp_path)
    assert loop.doubt is None


def test_a_script_may_say_that_no_step_depends_on_a_file(tmp_path: Path) -> None:
    loop = Loop(until=6, fails_at=4)
    source = script(CASES["file"], 4).replace("acts = [act]", "acts = [act]; carry(ignore=('state.json',))")
    run_script(source, loop, tmp_path)
    assert loop.doubt is None


def test_a_context_around_the_write_is_not_carried(tmp_path: Path) -> None:
    source = """
import decimal, torch
for step in steps():
    with step as value:
        with decimal.localcontext() as context, torch.autocast("cpu"):
            context.prec = 3
            step.write()
        step.end()
result = None
"""
    loop = Loop()
    run_script(source, loop, tmp_path)
    assert not [one for one in loop.kept_early.values() if decode_tree(one)]
