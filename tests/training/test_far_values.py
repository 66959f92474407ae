"""Values that a script's code changes in places that are not its own: undone, carried, told, or refused."""

from pathlib import Path

import pytest

from relight.errors import UsageError
from relight.transfer.io.codec import decode_tree
from tests.training.carried_loop import Loop, run_script

SCRIPT = """
import random, string, sys, textwrap
import numpy as np
from torch import nn

MADE

def run():
    for step in steps():
        with step as value:
            if step.number >= FIRST:
                CHANGE
            step.end()
    return repr(SHOWN)
result = run()
"""

CASES = {  # made, changed, shown
    "class of a library": ("nn.Linear.far = 1.0", "nn.Linear.far *= 0.9", "nn.Linear.far"),
    "function of a library": ("textwrap.wrap.far = 1", "textwrap.wrap.far += 1", "textwrap.wrap.far"),
    "list of a library": ("string.far = []", "string.far.append(step.number)", "string.far"),
    "arguments of the process": ("sys.argv.append('0')", "sys.argv[-1] += '1'", "sys.argv[-1]"),
    "bound method of a generator": ("draw = random.Random(3).random", "draw()", "draw.__self__.getstate()"),
    "generator as a default": (
        "def f(g=np.random.default_rng(1)):\n    return g.random()",
        "f()",
        "f.__defaults__[0].bit_generator.state",
    ),
    "defaults": ("def f(n=0):\n    f.__defaults__ = (f.__defaults__[0] + 1,)", "f()", "f.__defaults__"),
    "default of a keyword": ("def f(*, n=0):\n    f.__kwdefaults__['n'] += 1", "f()", "f.__kwdefaults__"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("first", [0, 3])
def test_values_in_places_of_others_are_equal_told_or_refused(
    case: tuple[str, str, str], first: int, tmp_path: Path
) -> None:
    made, change, shown = case
    source = SCRIPT.replace("MADE", made).replace("CHANGE", change).replace("SHOWN", shown)
    source = source.replace("FIRST", str(first))
    whole = Loop(until=8)
    whole.risks = []
    try:
        expected = run_script(source, whole, tmp_path)
    except UsageError:
        return
    undone = Loop(until=8, fails_at=5)
    assert run_script(source, undone, tmp_path) == expected or undone.doubt
    replaced = Loop(until=8, begins_at=6, tree=decode_tree(whole.kept[6]))
    found = run_script(source, replaced, tmp_path)
    assert found == expected or whole.risks[6] or replaced.doubt or whole.said
