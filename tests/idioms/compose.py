"""Composes training scripts at random, disturbs them, and compares: `python -m tests.idioms.compose`.

Each seed is a script made of blocks (tests/idioms/blocks), run once undisturbed and once with faults; both must end
with the same bits on every rank, or relight must have refused the script or told that it cannot vouch for the bits.
What fails is made smaller as long as it fails, and written to `composed-found/`.
"""

import argparse
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.idioms.blocks.faults import draw_faults, is_in_script
from tests.idioms.blocks.plan import Plan, compose
from tests.idioms.blocks.render import places, render
from tests.idioms.blocks.shrink import shrink
from tests.idioms.blocks.tally import Tally, record
from tests.idioms.blocks.trial import Trials, Verdict, scratch

FOUND = Path("composed-found")


def plan_of(seed: int) -> Plan:
    """The script of a seed, and its faults."""
    plan = compose(seed)
    chance = random.Random(f"faults {seed}")
    return replace(plan, faults=draw_faults(plan, places(render(plan)), chance))


def main() -> None:
    """The command."""
    options = _parse()
    directory = scratch()
    trials = Trials(directory, options.lock)
    tally = Tally(options.results)
    try:
        for seed in _seeds(options):
            plan = plan_of(seed)
            if options.block and not {*options.block} & {*plan.blocks()}:
                continue
            verdict = trials.judge(plan)
            tally.add(plan, verdict)
            print(f"{verdict.word:8} {plan.describe()}\n         {_first_line(verdict.why)}", flush=True)
            if verdict.failed:
                if options.shrink:
                    plan = shrink(plan, lambda candidate: trials.judge(candidate).word == verdict.word, options.tries)  # noqa: B023
                _show(plan, verdict, options.found)
    except KeyboardInterrupt:
        print("interrupted: the table is of what was done so far", flush=True)
    finally:
        if options.keep:
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    print(f"\n{tally.table()}")
    if options.record:
        record(tally)
    sys.exit(1 if tally.failed else 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.idioms.compose", description=__doc__)
    parser.add_argument("--seeds", help="A..B, both included, or one", default="")
    parser.add_argument("--minutes", type=float, help="new seeds, for so long", default=0.0)
    parser.add_argument(
        "--block", action="append", default=[], help="SLOT=OPTION: only scripts that have it, or another one so given"
    )
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="show what fails as it is")
    parser.add_argument("--tries", type=int, default=40, help="to make a failing script smaller")
    parser.add_argument("--keep", action="store_true", help="the directories of the jobs")
    parser.add_argument("--found", type=Path, default=FOUND, help="where scripts that failed are written")
    parser.add_argument(
        "--lock", type=Path, action="append", default=[], help="hold one of these files during each job"
    )
    parser.add_argument(
        "--results", type=Path, help="append each verdict here; the table and --record are of all that it holds"
    )
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/composed.{md,json}")
    options = parser.parse_args()
    if not options.seeds and not options.minutes:
        parser.error("say --seeds A..B or --minutes M")
    return options


def _seeds(options: argparse.Namespace) -> Iterator[int]:
    end = time.monotonic() + options.minutes * 60
    if options.seeds:
        first, _, last = options.seeds.partition("..")
        numbers = range(int(first), int(last or first) + 1)
    else:
        begin = int(time.time()) * 1000
        numbers = range(begin, begin + 1000)
    for seed in numbers:
        if options.minutes and time.monotonic() > end:
            return
        yield seed


def _show(plan: Plan, verdict: Verdict, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{verdict.word.lower()}-{plan.seed}.py"
    strikes = " ".join(fault for fault in plan.faults if is_in_script(fault))
    sentences = " ".join(f'--chaos "{fault}"' for fault in plan.faults if not is_in_script(fault))
    command = (
        f"mkdir -p /tmp/struck && STRIKES='{strikes}' STRUCK=/tmp/struck relight run --nproc-per-node {plan.ranks} "
        f"--standby 1 {sentences} {path}"
    )
    notes = [plan.describe(), f"faults: {plan.faults}", f"verdict: {verdict.word}", *verdict.why.splitlines(), command]
    path.write_text("".join(f"# {line}\n" for line in notes) + "\n" + render(plan))
    print(f"--- {path}\n{path.read_text()}---", flush=True)


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:160]


if __name__ == "__main__":
    os.environ.setdefault("RELIGHT_TEST_PATIENCE", "3")
    main()
