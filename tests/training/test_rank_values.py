"""Values made from the rank before the loop follow the rank that a replacement takes: scripts at random."""

import enum
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relight.training.carried.rank_values import (
    SLOTS,
    RankValues,
    _digest,
    differing_slots,
    entries_of,
    row_of,
)
from relight.training.carried.values.texts import refill, text_of
from tests.training.carried_loop import Loop, Step, run_script

SEEDS = 60
RANKS = 3

# Lines before the loop, and what a step reads of them.
NUMBERS = {
    "a name": ("start = RANK * 3", "start"),
    "a float": ("rate = 0.1 * (RANK + 1)", "rate"),
    "a flag": ("is_last = RANK == 2", "is_last"),
    "a negative number": ("below = -RANK - 2**40", "below"),
    "an object": ("loader = Thing(rank=RANK, place=RANK * 5)", "loader.rank + loader.place"),
    "an object in another": ("outer = Thing(inner=Thing(rank=RANK))", "outer.inner.rank"),
    "a class": ("class Kind(Thing):\n    rank = RANK", "Kind.rank"),
    "a closure": ("def make(own):\n    return lambda: own + 1\nown_of = make(RANK)", "own_of()"),
    "a sampler of torch": (
        "from torch.utils.data import *\nbatches = BatchSampler(DistributedSampler(range(9), 3, RANK), 2, False)",
        "batches.sampler.rank",
    ),
    "all alike": ("size = 3", "size"),
    "of this process": ("began = time.perf_counter_ns()", "began * 0"),
}
OTHERS = {
    "a list": ("files = ['a', 'b', 'c', 'd'][RANK::3]", "files[0]"),
    "a list of arrays": ("parts = [numpy.arange(2) + RANK for _ in range(60)]", "int(parts[-1][0])"),
    "a dict": ("named = {'rank': RANK}", "named['rank']"),
    "a tensor": ("offset = torch.full((3,), float(RANK))", "float(offset.sum())"),
    "a part of the data": (
        "from torch.utils.data import *\npart = DataLoader(Subset([1, 2, 3], range(RANK, 3)), batch_size=1)",
        "len(part.dataset.indices)",
    ),
    "a text": ("path = f'part-{RANK}'", "path"),
    "a path": ("from pathlib import Path; folder = Path(f'part-{RANK}')", "str(folder)"),
    "a range": ("mine = range(RANK, 20, 3)", "list(mine)"),
    "an item of a tuple": ("pair = (RANK, Thing())", "pair[0]"),
    "a number of NumPy": ("first = numpy.int64(RANK * 3)", "int(first)"),
    "an array": ("table = numpy.arange(4) + RANK", "int(table[0])"),
    "a set": ("seen = {RANK, 9}", "min(seen)"),
    "a generator of NumPy": ("draws = numpy.random.default_rng(RANK)", "repr(draws.bit_generator.state)"),
}
SCRIPT = """
import time
import numpy
import torch

class Thing:
    def __init__(self, **values):
        self.__dict__.update(values)

RANK = {rank}
{made}
result = []
for step in steps(3):
    with step as x:
        result.append(({read},))
        step.point(0)
"""


class RankLoop(Loop):
    """Calls `look` in the first step."""

    def __init__(self, look: Callable[[RankValues], None] = lambda _: None) -> None:
        super().__init__()
        self._look = look

    def enter(self, step: Step, frame: Any) -> None:
        self.doubt = self.carried.enter(frame, step.number) or self.doubt
        if step.number == 0:
            self._look(self.carried.rank_values)


def compared(sources: list[str], directory: Path) -> dict[str, Any]:
    """Return the knowledge of ranks after their comparison: one after another instead of by an all-reduce."""
    rows: list[list[int]] = []
    for source in sources:
        run_script(source, RankLoop(lambda values: rows.append(row_of(values.look()))), directory)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    assert len(sums) == SLOTS
    tables: list[list[int]] = []
    found: set[tuple[int, ...]] = set()

    def gather(values: RankValues) -> None:
        own = values.look()
        slots = differing_slots(row_of(own), sums, RANKS)
        found.add(tuple(slots))
        tables.append(entries_of(own, slots, len(tables), RANKS))

    for source in sources:
        run_script(source, RankLoop(gather), directory)
    (slots,) = found
    table = [sum(column) for column in zip(*tables, strict=True)]
    described: list[dict[str, Any]] = []

    def learn(values: RankValues) -> None:
        values.learn(values.look(), RANKS, slots, table)
        described.append(values.describe())

    for source in sources:
        run_script(source, RankLoop(learn), directory)
    assert all(one == described[0] for one in described)
    return described[0]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_replacement_computes_as_its_rank(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    chosen = draw.sample(sorted(NUMBERS), draw.randrange(1, 6))
    others = draw.sample(sorted(OTHERS), draw.choice([0, 0, 1, 2]))
    forms = [{**NUMBERS, **OTHERS}[name] for name in draw.sample(chosen + others, len(chosen + others))]
    made = "\n".join(made for made, _ in forms if "perf_counter" not in made)
    noise = "\n".join(made for made, _ in forms if "perf_counter" in made)
    made, read = f"{made}\n{noise}", ", ".join(read for _, read in forms)
    sources = [SCRIPT.format(rank=rank, made=made, read=read) for rank in range(RANKS)]
    known = compared(sources, tmp_path)
    for rank in range(RANKS):
        expected = run_script(sources[rank], RankLoop(), tmp_path)
        loop = RankLoop()
        assert loop.carried.rank_values.adopt(known, RANKS, RANKS - 1, rank) == ""
        result = run_script(sources[RANKS - 1], loop, tmp_path)
        if others and rank != RANKS - 1:
            assert loop.doubt is not None
            assert "made from the rank before the loop" in loop.doubt
        else:
            assert result == expected, (rank, chosen)
            assert loop.doubt is None


CARRIED = frozenset(OTHERS) - {"a part of the data", "an item of a tuple"}


@pytest.mark.parametrize("name", OTHERS)
def test_small_values_in_which_ranks_differ_are_carried_and_put_back(name: str, tmp_path: Path) -> None:
    made, read = OTHERS[name]
    long = "long = list(range(RANK, 1000))\nlarge = torch.zeros(2**17) + RANK"
    sources = [
        SCRIPT.format(rank=rank, made=f"{made}\n{long}", read=f"{read}, long[0], float(large[0])")
        for rank in range(RANKS)
    ]
    names: list[str] = []

    def learn(values: RankValues) -> None:
        own = values.look()
        slots = sorted(own)
        values.learn(own, RANKS, slots, [0] * (4 * len(slots) * RANKS))
        loop.carried.roll_back()  # of the step under way, which had begun with the same values
        names.extend(loop.carried.names)

    expected = run_script(sources[1], RankLoop(), tmp_path)
    loop = RankLoop(learn)
    assert run_script(sources[1], loop, tmp_path) == expected
    variable = made.rpartition("; ")[2].partition(" ")[0]
    assert (variable in names) == (name in CARRIED)
    assert not {"long", "large"} & set(names)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_process_that_starts_later_takes_the_numbers_of_the_job(is_last: bool, tmp_path: Path) -> None:
    """A checkpoint of the script's own was written since, and changes what is made before the loop."""
    found = "resumed_at = {at}\nmean = torch.ones(2) * {at}\nweights = torch.ones(5000) * {at}\n"
    sources = [
        SCRIPT.format(rank=rank, made=found.format(at=0), read="resumed_at + mean.sum()") for rank in range(RANKS)
    ]
    known = compared(sources, tmp_path)
    loop = RankLoop()
    rank = RANKS - 1 if is_last else 0
    assert loop.carried.rank_values.adopt(known, RANKS, RANKS - 1, rank) == ""
    later = SCRIPT.format(rank=RANKS - 1, made=found.format(at=5), read="resumed_at + mean.sum()")
    assert run_script(later, loop, tmp_path) == [(0,)] * 3
    assert loop.doubt is not None
    assert loop.doubt.startswith("weights: made before the loop, equal on all ranks when the job began")


def test_lists_of_what_was_handed_over_are_not_compared(tmp_path: Path) -> None:
    """A replacement has compared none of it: its parameters are those of another step until it is restored."""
    made = "net = torch.nn.Linear(1, 1, bias=False)\nnet.weight.data.fill_({at})\n"
    made += "steps.hand_over(net, torch.optim.SGD(net.parameters()))\nwritten = [*net.parameters()]"
    sources = [SCRIPT.format(rank=rank, made=made.format(at=0), read="len(written)") for rank in range(RANKS)]
    known = compared(sources, tmp_path)
    loop = RankLoop()
    assert loop.carried.rank_values.adopt(known, RANKS, RANKS - 1, 0) == ""
    run_script(SCRIPT.format(rank=RANKS - 1, made=made.format(at=5), read="len(written)"), loop, tmp_path)
    assert loop.doubt is None


def test_a_process_that_starts_later_takes_the_texts_of_the_job(tmp_path: Path) -> None:
    """Rank 0 made a directory, and told the others; a standby was alone in that broadcast."""
    made = "from pathlib import Path\nclass Saver: pass\nsaver = Saver()\nsaver.path = {path}\n"
    made += "folder = Path(saver.path or 'none')\nbegan = {path} or 'then'"
    read = "saver.path, f'{folder / began}'"
    sources = [SCRIPT.format(rank=rank, made=made.format(path="'/a'"), read=read) for rank in range(RANKS)]
    known = compared(sources, tmp_path)
    loop = RankLoop()
    assert loop.carried.rank_values.adopt(known, RANKS, RANKS - 1, rank=0) == ""
    later = SCRIPT.format(rank=RANKS - 1, made=made.format(path=None), read=read)
    assert run_script(later, loop, tmp_path) == run_script(sources[0], RankLoop(), tmp_path)
    assert loop.doubt is None


def test_a_rank_that_was_lost_before_the_comparison_is_doubted() -> None:
    values = RankLoop().carried.rank_values
    assert "before all ranks had compared" in values.adopt({}, RANKS, built_as=2, rank=0)
    assert values.adopt({}, RANKS, built_as=2, rank=2) == ""
    assert "before all ranks had compared" in values.adopt({"ranks": 4, "slots": [], "table": []}, RANKS, 2, 0)


@pytest.mark.parametrize("value", [[], [1, 0.1, "a", None], {"a": [1, {"b": 2}]}, deque([1.5, 2], maxlen=3)])
def test_small_containers_of_numbers_and_texts_are_refilled(value: Any) -> None:
    other = deque([7], maxlen=3) if isinstance(value, deque) else type(value)()
    assert refill(other, text_of(value))
    assert other == value


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.5),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.bfloat16),
        np.arange(4),
        torch.tensor([float("nan"), -0.0]),
    ],
    ids=str,
)
def test_small_tensors_that_a_collective_left_before_the_loop_are_filled(value: Any) -> None:
    """A standby was alone there: its own has other contents."""
    other = torch.zeros_like(value) if isinstance(value, torch.Tensor) else np.zeros_like(value)
    assert refill(other, text_of(value))
    assert _digest(other) == _digest(value)
    assert not refill(value[:0] if value.ndim else torch.ones(1), text_of(value))
    assert not refill([], text_of(value))


def test_large_tensors_and_some_that_may_not_be_written_are_not() -> None:
    assert text_of(torch.ones(5000)) == ""
    assert not refill(torch.zeros(1).expand(3), text_of(torch.ones(3)))


@pytest.mark.parametrize("value", [(1,), {1}, [1.0 + 2j, object()], [float("nan")], ["x" * 2000], list(range(99)), 5])
def test_others_are_not(value: Any) -> None:
    assert text_of(value) == ""
    assert not refill([], "")
    assert not refill({}, "[1]")


class Shy:
    """Counts who asks it for a text."""

    asked = 0

    def __repr__(self) -> str:
        Shy.asked += 1
        raise RuntimeError("not now")


class Color(enum.Enum):
    RED = 1

    def __repr__(self) -> str:
        raise RuntimeError("not now")


class Number(int):
    def __repr__(self) -> str:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    "value", [[Shy()], {"a": Shy()}, {Color.RED: 1}, [1, [2, (Shy(),)]], deque([Shy()]), [Number(1)]]
)
def test_nothing_of_the_users_is_asked_for_its_text(value: Any) -> None:
    assert text_of(value) == ""
    assert Shy.asked == 0


def test_members_of_an_enumeration_are_compared_by_their_names() -> None:
    assert (_digest(Color.RED) or "").endswith("Color', 'RED')")
