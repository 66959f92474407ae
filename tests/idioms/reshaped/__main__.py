"""Scripts of the library in other shapes, chosen at random: each undisturbed, and with faults.

    python -m tests.idioms.reshaped [NAME ...] [--cases N] [--seed S] [--minutes M] [--keep DIR] [--restarts]

A shape moves variables of the loop (into an object, a dictionary, a closure, ...), or the block (into a function, into
`try`, ...), and does not change what is computed: without relight, the script ends with the bits of the original.
`--restarts`: it gets checkpoints, its job is killed as a whole and started again, and the faults strike after that.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.idioms import library
from tests.idioms.reshaped.reshape import reshaped
from tests.idioms.resumed import faults_after, kill_job, newest, with_checkpoints
from tests.idioms.trial import run_variant, without_relight
from tests.idioms.verdict import Verdict, digests_in, judge, sections, what_differs

_PHASES = ("FORWARD", "BACKWARD", "BEFORE_BARRIER", "BARRIER", "OPTIMIZER", "AFTER_WRITE", "AFTER_STEP")
_STEPS = 11  # most scripts have some more


def main() -> int:
    """The number of cases that failed, at most 100."""
    options = _parse()
    names = [library.path_of(name).stem for name in options.names] or library.names()
    end = time.monotonic() + options.minutes * 60
    failed = 0
    counts: dict[str, int] = {}
    for number in range(options.cases):
        if time.monotonic() > end:
            break
        seed = options.seed + number
        draw = random.Random(f"reshaped/{seed}")
        with tempfile.TemporaryDirectory(prefix="reshaped-") as directory:
            verdict = _try(draw.choice(names), seed, draw, Path(directory), restarts=options.restarts)
            if verdict in ("SILENT", "LOST") or "plain" in verdict:
                failed += verdict in ("SILENT", "LOST")
                if options.keep is not None:
                    shutil.copytree(directory, options.keep / f"seed-{seed}", dirs_exist_ok=True)
        counts[verdict] = counts.get(verdict, 0) + 1
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())), flush=True)
    return min(100, failed)


def _try(name: str, seed: int, draw: random.Random, directory: Path, *, restarts: bool) -> str:
    """One case; its verdict in a word."""
    text, shapes = reshaped(library.path_of(name), draw)
    if not shapes:
        return "without shape"
    head = f"seed {seed}: {name} ({', '.join(shapes)})"
    path = directory / f"{name}.py"
    path.write_text(text)
    plain, output = _plain(name), _plain_of(path)
    expected = digests_in(output)
    if not plain or expected != plain:
        print(
            f"{head}: not compared: {'no' if not plain else 'other'} bits without relight: {output[-400:]}", flush=True
        )
        return "no plain" if not plain else "other plain"
    faults = _faults(name, draw)
    if restarts:
        root = directory / "checkpoints"
        saving = with_checkpoints(text, root, draw.choice((1, 3, 4)))
        if saving is None or kill_job(name, path, saving, root, draw.choice((1, 1, 2))):
            return "not restarted"
        faults = [*faults, *faults_after(name, newest(root))] if draw.random() < 0.7 else []
        head = f"{head}, from a checkpoint"
    ending = run_variant(name, path, faults)
    verdict, words = judge(ending, expected)
    if verdict is Verdict.SILENT:
        path.write_text(text)
        alone = run_variant(name, path)
        verdict, words = judge(ending, alone.digests)
        words += f"; undisturbed, not as without relight: {what_differs(alone.digests, expected)}"
    shown = "equal, told" if verdict is Verdict.EQUAL and words else str(verdict)
    print(f"{head}: {'; '.join(faults)}: {shown} ({ending.failures} failures) {words[:600]} {ending.left}", flush=True)
    return shown


def _faults(name: str, draw: random.Random) -> list[str]:
    found = []
    ranks = library.ranks_of(name)
    for _ in range(draw.choice((1, 2, 2, 3))):
        step = draw.choice((0, 1, 2, draw.randrange(_STEPS), draw.randrange(_STEPS), draw.randrange(_STEPS)))
        if draw.random() < 0.2 and step:
            found.append(f"kill rank {draw.randrange(ranks)} between steps at step {step}")
        else:
            found.append(f"kill rank {draw.randrange(ranks)} in {draw.choice(_PHASES)} of step {step}")
    return sorted({fault.rsplit(" ", 1)[1]: fault for fault in found}.values())


_PLAIN: dict[str, dict[int, str]] = {}


def _plain(name: str) -> dict[int, str]:
    if name not in _PLAIN:
        _PLAIN[name] = digests_in(sections(without_relight(name)).get(name, ""))
    return _PLAIN[name]


def _plain_of(path: Path) -> str:
    return without_relight(str(path))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.idioms.reshaped", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts to choose from; default: all")
    parser.add_argument("--cases", type=int, default=10_000, help="default: as many as there is time for")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next has the next one")
    parser.add_argument("--minutes", type=float, default=10.0, help="default 10")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy scripts of cases that failed there")
    parser.add_argument("--restarts", action="store_true", help="kill each job as a whole, and start it again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
