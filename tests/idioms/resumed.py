"""Scripts of the library that end in the middle and are started again, from a checkpoint.

    python -m tests.idioms.resumed [NAME ...] [--every K] [--times N] [--kills] [--more-steps]

Each script gets a `training.checkpoint(...)` after its `relight.Training(...)`. Its job is killed as a whole once a
checkpoint is there, and started again (`--times`: so often); its end is compared with that of an undisturbed job.
`--kills`: one rank is lost in the first steps of the last start. `--more-steps`: instead of being killed, the first job
is asked for fewer steps, and comes to its end.
"""

import argparse
import ast
import functools
import random
import re
import sys
import tempfile
from pathlib import Path

from relight.training.checkpoint.files import published
from tests.idioms import library
from tests.idioms.trial import kill_when, run_variant, undisturbed
from tests.idioms.verdict import Verdict, judge

_AT_LEAST = 2  # steps that a job takes before it is killed
_PLACES = (
    *(f"in {point}" for point in ("FORWARD", "BACKWARD", "BARRIER", "OPTIMIZER", "AFTER_WRITE", "AFTER_STEP")),
    "between steps",
)
_UNTIL = re.compile(r"(\.steps\(until=|\.epochs\()(\d+)")


def main() -> int:
    """The number of scripts that failed, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", type=int, default=3, help="steps from one checkpoint to the next")
    parser.add_argument("--times", type=int, default=1, help="how often the job is killed and started again")
    parser.add_argument("--kills", action="store_true", help="kill a rank soon after the last start")
    parser.add_argument("--more-steps", action="store_true", help="ask the first job for half of the steps or epochs")
    options = parser.parse_args()
    failed = 0
    for name in [library.path_of(name).stem for name in options.names] or library.names():
        verdict, words = examine(
            name, options.every, times=options.times, kills=options.kills, more_steps=options.more_steps
        )
        failed += verdict is not None and verdict.is_failure
        print(f"{name}: {verdict.value if verdict else 'no trial'} {words[:300]}", flush=True)
    return min(100, failed)


def examine(
    name: str, every: int, *, times: int = 1, kills: bool = False, more_steps: bool = False
) -> tuple[Verdict | None, str]:
    """Judge the end of a job that was started again. None: there was nothing to start again from."""
    with tempfile.TemporaryDirectory(prefix="resumed-") as directory:
        root, path = Path(directory) / "checkpoints", Path(directory) / f"{name}.py"
        text = with_checkpoints(library.path_of(name).read_text(), root, every)
        if text is None:
            return None, "it makes no training that is bound to a name, or writes checkpoints itself"
        expected = undisturbed(name)
        if expected.status or expected.usage:
            return None, "it is refused, or fails by itself"
        why = _end_early(name, path, text, root) if more_steps else kill_job(name, path, text, root, times)
        if why:
            return None, why
        faults = faults_after(name, newest(root)) if kills else []
        path.write_text(text)
        verdict, words = judge(run_variant(name, path, faults), expected.digests)
        return verdict, "; ".join(filter(None, (*faults, words)))


def faults_after(name: str, step: int) -> list[str]:
    """Return the loss of one rank in this step, or the next one."""
    draw = random.Random(f"{name}/{step}/resumed")
    place, step = draw.choice(_PLACES), step + draw.randrange(2)
    rank = draw.randrange(library.ranks_of(name))
    return [f"kill rank {rank} {place} {'at' if place == 'between steps' else 'of'} step {step}"]


def kill_job(name: str, path: Path, text: str, root: Path, times: int) -> str:
    """Start the job so often, and kill it each time once it has a new checkpoint. Returns why that was not possible."""
    path.write_text(text)
    for _ in range(times):
        least = newest(root) + _AT_LEAST
        if not kill_when(name, path, functools.partial(_has_reached, root, least)):
            return "it ended before it was killed"
    return ""


def _end_early(name: str, path: Path, text: str, root: Path) -> str:
    """Run a job of half as many steps. Returns why that was not possible."""
    fewer = _UNTIL.sub(lambda found: f"{found[1]}{(int(found[2]) + 1) // 2}", text)
    if fewer == text:
        return "it says its number of steps elsewhere"
    path.write_text(fewer)
    if run_variant(name, path).status:
        return "it fails with fewer steps"
    return "" if published(root) else "it wrote no checkpoint"


def _has_reached(root: Path, step: int) -> bool:
    return newest(root) >= step


def newest(root: Path) -> int:
    """Return the step of the newest checkpoint."""
    return max(published(root), default=0)


def with_checkpoints(source: str, root: Path, every: int) -> str | None:
    """A script that writes checkpoints into `root`. None: there is no place to say so."""
    if ".checkpoint(" in source:
        return None
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _makes_training(node.value):
            indent = " " * node.col_offset
            call = f"{ast.unparse(node.targets[0])}.checkpoint({str(root)!r}, every={every})"
            lines.insert(node.end_lineno or node.lineno, f"{indent}{call}")
            return "\n".join(lines) + "\n"
    return None


def _makes_training(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "Training"


if __name__ == "__main__":
    sys.exit(main())
