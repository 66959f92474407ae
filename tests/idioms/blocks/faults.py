"""The faults that strike a composed script: planned ones of `--chaos`, and deaths at places in the script itself."""

import random
import re

from tests.idioms.blocks.plan import Plan

_POINTS = "BETWEEN_STEPS FORWARD BACKWARD BEFORE_BARRIER BARRIER OPTIMIZER AFTER_WRITE AFTER_STEP".split()
_RECOVERY_POINTS = "STOP FINISH REFORM RESTORE_SEND RESTORE_RECEIVE ROLLBACK RESUME".split()
_IN_SCRIPT = re.compile(r"\d+\.\d+\.[a-z-]+")


def draw_faults(plan: Plan, places: list[str], chance: random.Random) -> tuple[str, ...]:
    """Three or four; now and then one strikes the recovery from another.

    They are two steps apart at least: a rank that finishes a step by itself and begins the next one must not die with
    the one whose death it has not heard of, or every replica may be lost.
    """
    faults = []
    for step in _apart(plan.steps, chance.choice((3, 3, 4)), chance):
        rank = chance.randrange(plan.ranks)
        if places and chance.random() < 0.6:
            faults.append(f"{rank}.{step}.{chance.choice(places)}")
            continue
        action = chance.choice(("kill", "kill", "kill", "segfault"))
        faults.append(f"{action} rank {rank} in {chance.choice(_POINTS)} of step {step}")
    if plan.ranks > 2 and chance.random() < 0.25:
        faults.append(f"kill rank {chance.randrange(plan.ranks)} in {chance.choice(_RECOVERY_POINTS)} of recovery 1")
    return tuple(faults)


def is_in_script(fault: str) -> bool:
    """Return whether the script itself carries it out."""
    return _IN_SCRIPT.fullmatch(fault) is not None


def _apart(steps: int, number: int, chance: random.Random) -> list[int]:
    """So many different steps, of which no two are neighbours."""
    return [step + index for index, step in enumerate(sorted(chance.sample(range(steps - number + 1), number)))]
