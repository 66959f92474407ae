"""Code above the block of a step changes something that code after the block expects, also after a failure."""

from pathlib import Path
from textwrap import indent

import pytest

from tests.training.carried_loop import STEPS, Loop, run_script

HELPERS = """
import contextlib
class Timer:
 def __init__(self):
  self.running, self.stops = False, 0
 def start(self):
  assert not self.running
  self.running = True
 def stop(self):
  assert self.running
  self.running = False
  self.stops += 1
timer, names, total = Timer(), [], [0]
@contextlib.contextmanager
def section(name):
 names.append(name)
 try:
  yield len(names)
 finally:
  names.pop()
def timed(found):
 for step in found:
  names.append('turn')
  timer.start()
  yield step
  timer.stop()
  names.pop()
def opened(step):
 timer.start()
 return step
"""
BLOCK = "with section('inner'):\n total[0] += b * len(names)\nstep.end()"
LOOPS = {
    "a context manager before the step": ("for step in steps():\n with section('turn'), step as b:", 2, ""),
    "a context manager around the block": ("for step in steps():\n with section('turn'):\n  with step as b:", 3, ""),
    "calls above and after the block": (
        "for step in steps():\n timer.start()\n names.append(1)\n with step as b:",
        2,
        " timer.stop()\n names.pop()",
    ),
    "a generator around the steps": ("for step in timed(steps()):\n with step as b:", 2, ""),
    "a function that is called for each step": (
        "for step in map(opened, steps()):\n with step as b:",
        2,
        " timer.stop()",
    ),
}


def script(name: str) -> str:
    head, depth, after = LOOPS[name]
    loop = f"{head}\n{indent(BLOCK, ' ' * depth)}\n{after}\n"
    return f"{HELPERS}\ndef run():\n{indent(loop, ' ')}\n return total[0], timer.stops, list(names)\nresult = run()\n"


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("fails_at", range(STEPS))
def test_code_after_an_interrupted_block_finds_what_code_above_has_done(
    name: str, fails_at: int, tmp_path: Path
) -> None:
    expected = run_script(script(name), Loop(), tmp_path)
    loop = Loop(fails_at=fails_at)
    assert run_script(script(name), loop, tmp_path) == expected
    assert loop.rolled_back == [None]
