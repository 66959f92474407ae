"""Variables that go on from step to step where a loop of epochs stands around that of the steps, found in the code.

Each line that writes one of them first is marked `#w`.
"""

import sys
from pathlib import Path
from textwrap import indent
from types import FrameType

import pytest

from relight.training.carried.code.refs import describe
from relight.training.carried.code.source import target_of
from relight.training.carried.finding.kept import Kept
from relight.training.carried.finding.loop import Loop
from relight.training.carried.finding.places import Frames
from tests.training.carried_shapes import enter_script, shown


def one_function(block: str, *, setup: str = "", head: str = "", after: str = "", end: str = "") -> str:
    """Both loops in one function: `head` and `after` stand around the loop of steps, `end` after that of epochs."""
    body = f"{indent(head, '  ')}\n  for step in steps():\n   with step as b:\n{indent(block, '    ')}\n"
    return (
        f"def run():\n{indent(setup, ' ')}\n for epoch in epochs(3):\n{body}{indent(after, '  ')}\n"
        f"{indent(end, ' ')}\nrun()\n"
    )


def two_functions(block: str, *, setup: str = "", head: str = "", given: str = "", parameters: str = "") -> str:
    """A function for each epoch, called in the loop of epochs with what is `given`."""
    body = f"{indent(head, ' ')}\n for step in steps():\n  with step as b:\n{indent(block, '   ')}\n return b\n"
    return (
        f"def train({parameters}):\n{body}"
        f"def run():\n{indent(setup, ' ')}\n for epoch in epochs(3):\n  last = train({given})\nrun()\n"
    )


SHAPES = {
    "nothing": (one_function("loss = b\nloss.backward()"), ""),
    "a sum that each epoch begins anew": (one_function("total += b #w\nb.backward()", head="total = 0"), "~total"),
    "the best so far": (
        one_function("b.backward()", setup="best = 0", after="if b > best:\n best = b #w", end="print(best)"),
        "~best",
    ),
    "patience that ends training": (
        one_function("b.backward()", setup="waited = 0", after="waited += 1 #w\nif waited > 2:\n break"),
        "waited",
    ),
    "a value that the next epoch uses": (
        one_function("(b * rate).backward()", setup="rate = 1.0", after="rate = b * 2 #w"),
        "rate",
    ),
    "a value that the head of an epoch sets": (
        one_function("(b * rate).backward()", head="rate = epoch * 2 #w"),
        "rate",
    ),
    "rates by hand, after each epoch": (
        one_function("b.backward()", setup="groups = [{'lr': 1}]", after="for g in groups:\n g['lr'] *= 0.9 #w"),
        "~groups",
    ),
    "a function's own sum": (two_functions("total += b #w\nb.backward()", head="total = 0"), "~total"),
    "a list that a function is given": (
        two_functions("seen.append(b) #w\nb.backward()", setup="log = []", given="log", parameters="seen"),
        "~log|~seen",
    ),
    "what a function is given stays the same": (
        two_functions("f(b)", setup="f = print", given="f", parameters="f"),
        "",
    ),
    "what a function is given follows from the epoch": (
        two_functions("(b * rate).backward()", given="epoch + 1", parameters="rate"),
        "rate",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_finds_what_is_carried(name: str, tmp_path: Path) -> None:
    source, expected = SHAPES[name]
    entered = enter_script(source, tmp_path)
    assert entered.names is not None
    numbers = {name for _, name in entered.of_epoch}
    found = {name: line for name, line in shown(entered.names).items() if name.lstrip("~") not in numbers}
    assert sorted(found) == sorted(filter(None, expected.split("|")))
    marked = {number for number, line in enumerate(source.splitlines(), 1) if "#w" in line}
    assert not marked or set(found.values()) == marked


SAMPLER = """
class Sampler:
 def __init__(self):
  self.epoch, self.n = 0, 0
 def set_epoch(self, epoch):
  'Documented.'
  self.epoch = epoch
  {}
class Loader:
 def __init__(self):
  self.sampler = Sampler()
loader = Loader()
"""
_SET_BY = "loader.sampler.set_epoch(epoch)"
SET = {
    "in the loop": ("", one_function("b.backward()", head=_SET_BY), True),
    "in a function": (
        "",
        two_functions("b.backward()", head="a.sampler.set_epoch(e)", given="loader, epoch", parameters="a, e"),
        True,
    ),
    "another number": ("", one_function("b.backward()", head="loader.sampler.set_epoch(epoch + 1)"), False),
    "by hand as well": ("", one_function("loader.sampler.epoch += 1\nb.backward()", head=_SET_BY), False),
    "with something else": ("self.n += 1", one_function("b.backward()", head=_SET_BY), False),
}


@pytest.mark.parametrize("name", SET)
def test_an_attribute_that_only_gets_the_number_of_the_epoch(name: str, tmp_path: Path) -> None:
    more, source, expected = SET[name]
    names = enter_script(SAMPLER.format(more) + source, tmp_path).names
    assert names is not None
    found = {describe(one.place): one.is_of_epoch for one in names.found.values()}
    assert [is_so for text, is_so in found.items() if text.endswith(".sampler.epoch")] == [expected]


def test_a_name_of_the_epoch_in_each_function(tmp_path: Path) -> None:
    """The number gets a replacement in all functions that only pass it on."""
    source = two_functions("(b * e).backward()", given="5, e=epoch", parameters="n, e")
    assert enter_script(source, tmp_path).of_epoch == ((1, "epoch"), (0, "e"))
    changed = two_functions("(b * e).backward()", head="e = e + 1", given="5, e=epoch", parameters="n, e")
    entered = enter_script(changed, tmp_path)
    assert entered.of_epoch == ((1, "epoch"),)
    assert entered.names is not None
    assert "e" in shown(entered.names)


def test_a_loop_of_epochs_that_gives_other_things_than_their_numbers(tmp_path: Path) -> None:
    """A replacement could give its variables no values."""
    loop = " for step in steps():\n  with step as b:\n   pass\n"
    for head in ("for pair in enumerate(epochs(3)):", "for n, epoch in enumerate(epochs(3)):"):
        entered = enter_script(f"{head}\n{loop}", tmp_path)
        assert entered.head is not None
        assert not target_of(entered.head)
    entered = enter_script(f"for epoch in epochs(3):\n{loop}", tmp_path)
    assert entered.head is not None
    assert target_of(entered.head) == "epoch"


def test_what_only_the_code_between_two_epochs_changes(tmp_path: Path) -> None:
    """After any other step a rank may be lost that has not run that code: nothing is missed."""
    source = one_function(
        "(b * rate * mean).backward()\noptimizer.step()\nshown += b\ntotal += b",
        setup="optimizer = type('', (), {'step': print})()\nbest = rate = mean = total = 0\nlog = []",
        head="shown = 0\nmean = epoch",
        after="log.append(b)\nbest = max(best, b)\nrate = best",
        end="print(best, total)",
    )
    names = enter_script(source, tmp_path).names
    assert names is not None
    late = {describe(one.place): one.at_end_of_epoch for one in names.found.values() if one.late or one.after_write}
    late.pop("epoch")
    assert late == {"best": True, "rate": True, "mean": True, "log": True, "shown": False, "total": False}


def test_what_changes_after_the_block_between_two_epochs_alone(tmp_path: Path) -> None:
    """A barrier at the end of the block keeps it, after any step but the last one of an epoch."""
    source = one_function(
        "(b * count * mean).backward()\noptimizer.step()\ncount += 1",
        setup="optimizer = type('', (), {'step': print})()\nmean = 0",
        head="count = epoch",
    ).replace("    count += 1", "    count += 1\n   mean += 1")
    names = enter_script(source, tmp_path).names
    assert names is not None
    found = {describe(one.place): one for one in names.found.values()}
    count, mean = found["count"], found["mean"]
    assert (count.late, count.at_end_of_epoch, count.late_at_end) == (True, False, True)
    assert (mean.late, mean.at_end_of_epoch, mean.late_at_end) == (True, False, False)


@pytest.mark.parametrize(
    ("early", "ends_epoch", "may_change"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_when_it_may_change_after_the_barrier(early: bool, ends_epoch: bool, may_change: bool) -> None:
    spot = Loop().spots.find((("module", "sys", "path"),))
    assert spot is not None
    one = Kept("count", "count", "", spot, feeds=True, late=True, after_write=True, late_at_end=True)
    assert one.may_change(early=early, ends_epoch=ends_epoch) == may_change


def test_an_object_with_one_name_in_both_functions() -> None:
    """`self` of a method: values are compared as the function with the loop of steps has it."""

    def train(self: object, other: int) -> FrameType:
        return sys._getframe()

    def fit(self: object, other: str) -> list[FrameType]:
        return [train(self, 1), sys._getframe()]

    loop, attribute = Loop(), ("attribute", "best", "")
    loop.spots.frames = Frames(fit(object(), ""))
    assert loop.lasting((("frame", "1", "self"), attribute)) == (("frame", "0", "self"), attribute)
    assert loop.lasting((("frame", "1", "other"), attribute)) == (("frame", "1", "other"), attribute)
    assert loop.lasting((("frame", "1", "self"),)) == (("frame", "1", "self"),)


def with_settings(tests: str, *, dry: bool = False, most: int = 0, block: str = "b.backward()") -> str:
    """A script that leaves its loop of steps if one of these conditions holds."""
    settings = f"import argparse\nargs = argparse.Namespace(dry={dry}, most={most})"
    leaving = "".join(f"\n   if {test}:\n    break" for test in tests.split(";"))
    return one_function(block, setup=settings).replace("    b.backward()", f"    b.backward(){leaving}")


LEFT = {
    "by settings that are off": (with_settings("args.dry;args.most and b > args.most;not args.most == 0"), None),
    "by a setting that is on": (with_settings("args.dry", dry=True), 10),
    "by a setting that counts": (with_settings("args.most and b > args.most", most=3), 10),
    "by a setting that steps change": (with_settings("args.dry", block="args.dry = b\nb.backward()"), 11),
    "by what is no setting": (with_settings("args"), 10),
    "not at all": (one_function("b.backward()"), None),
    "by break": (one_function("b.backward()").replace("    b.backward()", "    b.backward()\n   if b:\n    break"), 9),
    "with the loop of epochs": (
        one_function("b.backward()", after="if b:\n break").replace(
            "    b.backward()", "    b.backward()\n   if b:\n    break"
        ),
        None,
    ),
    "a loop inside": (one_function("for i in range(3):\n break"), None),
    "by return, of a function": (
        two_functions("b.backward()").replace("   b.backward()", "   b.backward()\n  if b:\n   return 1"),
        7,
    ),
    "by return, with all": (
        one_function("b.backward()").replace("    b.backward()", "    b.backward()\n   if b:\n    return 1"),
        None,
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_an_epoch_that_is_left_early(name: str, tmp_path: Path) -> None:
    source, line = LEFT[name]
    leaves = enter_script(source, tmp_path).leaves
    assert (leaves and int(leaves.rpartition(":")[2])) == line


def test_a_loop_inside_an_epoch(tmp_path: Path) -> None:
    """It would take the steps of an epoch more than once."""
    source = "for epoch in epochs(3):\n for part in range(2):\n  for step in steps():\n   with step as b:\n    pass\n"
    assert (enter_script(source, tmp_path).around or "").endswith(":2")
    around = "for seed in range(2):\n for epoch in epochs(3):\n  for step in steps():\n   with step as b:\n    pass\n"
    assert enter_script(around, tmp_path).around is None
