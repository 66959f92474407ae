"""Every script of the library, undisturbed and disturbed.

    python -m tests.idioms [NAME ...] [--rounds R] [--seed S] [--record]

For each script: its end without relight, undisturbed under relight, with kills in phases, in its first two steps, and R
times with kills at random times. `--record` writes the table into benchmarks/results/.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.idioms import library, record
from tests.idioms.record import Row, Trial
from tests.idioms.trial import (
    DEVICE_VARIABLE,
    STRIKES,
    early_kills,
    killed_at_random,
    killed_in_phases,
    phase_kills,
    undisturbed,
    without_relight,
)
from tests.idioms.verdict import Ending, Verdict, digests_in, judge, sections, what_differs

_MOST_ROUNDS = 20  # for --random-kills


def main() -> int:
    """The number of scripts that failed, at most 100."""
    options = _parse()
    if options.device:
        os.environ[DEVICE_VARIABLE] = options.device
    names = [library.path_of(name).stem for name in options.names] or library.names()
    rows = []
    for name in names:
        row = examine(name, options)
        rows.append(row)
        if options.results:
            record.remember(options.results, row)
    if options.results:
        rows = record.recall(options.results)
    if options.record:
        record.write(rows, rounds=options.rounds, kills=options.kills, strikes=options.strikes, seed=options.seed)
    print("\n".join(record.table(rows)))
    return min(100, sum(row.worst.is_failure for row in rows))


def examine(name: str, options: argparse.Namespace) -> Row:
    """All jobs of one script."""
    output = options.plain.read_text() if options.plain else "" if options.device else without_relight(name)
    plain = {} if options.device else digests_in(sections(output).get(name, ""))
    keep: Path | None = options.keep
    row = Row(name=name, plain="" if plain else output[-300:])
    expected = plain
    if not options.quick or not plain:
        expected = _undisturbed(row, plain, keep)
    if row.worst in (Verdict.REFUSED, Verdict.LOST):
        return row
    sentences = phase_kills(name, options.seed, options.kills) if options.phases is None else options.phases
    for what, disturb in _disturbances(row, sentences, options):
        ending = disturb()
        verdict, words = judge(ending, expected)
        if verdict is Verdict.SILENT and options.quick and expected is plain:
            expected = _undisturbed(row, plain, keep)
            verdict, words = judge(ending, expected)
        if verdict is Verdict.SILENT and options.device and dict(undisturbed(name).digests) != expected:
            row.trials.clear()
            row.plain = "not compared: undisturbed, it ends with other bits each time"
            print(f"{name}: {row.plain}", flush=True)
            return row
        _add(row, what, verdict, words, ending)
    return row


def _disturbances(
    row: Row, sentences: Sequence[str], options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Ending]]]:
    """The jobs of one script that are to be disturbed, given out one after the other."""
    if sentences:
        yield "phases", partial(killed_in_phases, row.name, sentences, options.keep)
    if options.phases is None:
        yield "early", partial(killed_in_phases, row.name, early_kills(row.name, options.seed), options.keep)
    for number in itertools.count():
        if number >= options.rounds and (number >= _MOST_ROUNDS or row.random_kills >= options.random_kills):
            return
        seed = options.seed + number
        yield f"random {seed}", partial(killed_at_random, row.name, seed, options.strikes, options.keep)


def _undisturbed(row: Row, plain: dict[int, str], keep: Path | None) -> dict[int, str]:
    ending = undisturbed(row.name, keep)
    if ending.status:
        verdict, words = judge(ending, {})
        _add(row, "undisturbed", verdict, words, ending)
    else:
        different = what_differs(ending.digests, plain) if plain else ""
        _add(row, "undisturbed", Verdict.EQUAL, f"not as without relight: {different}" if different else "", ending)
    return dict(ending.digests)


def _add(row: Row, what: str, verdict: Verdict, words: str, ending: Ending) -> None:
    words = "; ".join(part for part in (words, ending.left) if part)
    row.trials.append(Trial(what=what, verdict=verdict, failures=ending.failures, words=words))
    print(f"{row.name}: {what}: {verdict} ({ending.failures} failures) {words}", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.idioms", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="scripts; default: all")
    add("--rounds", type=int, default=1, help="jobs with kills at random times for each script; default 1")
    add(
        "--random-kills", type=int, default=0, metavar="N", help="more rounds, until so many random kills were survived"
    )
    add("--kills", type=int, default=6, help="kills in phases, of six; default 6")
    add("--strikes", type=int, default=STRIKES, help=f"kills at random times in one job; default {STRIKES}")
    add("--phases", action="append", metavar="SENTENCE", help="this fault instead; '' for none")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="an undisturbed job only where the run without relight ends otherwise")
    add("--plain", type=Path, help="what `python -m tests.idioms.plain` printed, instead of asking it for each script")
    add("--device", default="", help="torch's default device in each script: cuda (all ranks share one), or late")
    add("--keep", type=Path, metavar="DIR", help="copy the run directories of all jobs there")
    add("--results", type=Path, help="append each script's verdicts here, and show all that it holds")
    add("--record", action="store_true", help="write benchmarks/results/idioms.md and .json")
    options = parser.parse_args()
    if options.phases is not None:
        options.phases = [sentence for sentence in options.phases if sentence]
    return options


if __name__ == "__main__":
    sys.exit(main())
