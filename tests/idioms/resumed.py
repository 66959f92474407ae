"""Scripts of the library that end in the middle and are started again, from a checkpoint.

    python -m tests.idioms.resumed [NAME ...] [--every K]

Each script gets a `training.checkpoint(...)` after its `relight.Training(...)`. Its job is killed as a whole once a
checkpoint is there, and started again; its end is compared with that of an undisturbed job.
"""

import argparse
import ast
import sys
import tempfile
from pathlib import Path

from relight.training.checkpoint.files import published
from tests.idioms import library
from tests.idioms.trial import run_again_after_kill, undisturbed
from tests.idioms.verdict import Verdict, judge

_AT_LEAST = 2  # steps that the job has taken when it is killed


def main() -> int:
    """The number of scripts that failed, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", type=int, default=3, help="steps from one checkpoint to the next")
    options = parser.parse_args()
    failed = 0
    for name in [library.path_of(name).stem for name in options.names] or library.names():
        verdict, words = examine(name, options.every)
        failed += verdict is not None and verdict.is_failure
        print(f"{name}: {verdict.value if verdict else 'no trial'} {words[:300]}", flush=True)
    return min(100, failed)


def examine(name: str, every: int) -> tuple[Verdict | None, str]:
    """Judge the end of a job that was started again. None: there was nothing to start again from."""
    with tempfile.TemporaryDirectory(prefix="resumed-") as directory:
        root, path = Path(directory) / "checkpoints", Path(directory) / f"{name}.py"
        text = with_checkpoints(library.path_of(name).read_text(), root, every)
        if text is None:
            return None, "it makes no training that is bound to a name, or writes checkpoints itself"
        path.write_text(text)
        expected = undisturbed(name)
        if expected.status or expected.usage:
            return None, "it is refused, or fails by itself"
        again = run_again_after_kill(name, path, lambda: max(published(root), default=0) >= _AT_LEAST)
        if again is None:
            return None, "it ended before it was killed"
        return judge(again, expected.digests)


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
