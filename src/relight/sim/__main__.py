"""`python -m relight.sim`: run simulated jobs, look at one, hunt planted bugs, search all orders of small jobs."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from relight.sim.model.contents import Violation
from relight.sim.model.schedule import KINDS, Schedule, decode_schedule, encode_schedule, schedule_of
from relight.sim.model.shapes import SHAPES
from relight.sim.planted.mutations import HUNTED, MUTATIONS, Mutation, find_mutation
from relight.sim.search import exhaustive
from relight.sim.search.golden import Golden, format_golden, read_golden, rewritten
from relight.sim.search.shrink import shrink
from relight.sim.search.swarm import Found, search
from relight.sim.timed.job import PRODUCTION, SimulatedJob
from relight.timeline.draw.terminal import duration

EPILOG = """\
examples:
  python -m relight.sim --seeds 100000                 the first 100,000 random schedules
  python -m relight.sim --seconds 180 --first 5000000  as many as three minutes allow, others than yesterday
  python -m relight.sim --seconds 180 --with fallback    only jobs with fallback tiers: buddy memory, checkpoints
  python -m relight.sim --seed 4711                    one of them, with all that happens in it
  python -m relight.sim --seed 4711 --shrink           a smaller schedule that breaks the same invariant
  python -m relight.sim --replay FILE                  a recorded schedule (tests/sim/regressions)
  python -m relight.sim --exhaustive 3 --faults 2      every order of events of a job of three ranks with two deaths
  python -m relight.sim --exhaustive 3 --shapes late-private,two-early   the same where steps have two writes
  python -m relight.sim --mutations                    plant every known bug, and show how soon each is found
  python -m relight.sim --mutation no-barrier          one of them
exit status: 0 if every invariant held (or every planted bug was found), 1 if not, 2 if the command is wrong
"""

_RANDOM = ("seed", "seeds", "seconds")
_MODES = (*_RANDOM, "replay", "rewrite", "exhaustive", "mutations")
# The modes that each option goes with; to ignore one would be to answer another question than the one that was asked.
_GOES_WITH = {
    "first": ("seeds", "seconds", "mutations"),
    "kinds": _RANDOM,
    "mutation": tuple(mode for mode in _MODES if mode != "rewrite"),
    "shrink": ("seed", "replay"),
    "record": ("seed", "replay", "mutations"),
    "processes": ("seeds", "seconds"),
    "steps": ("exhaustive",),
    "faults": ("exhaustive",),
    "actions": ("exhaustive",),
    "fine": ("exhaustive",),
    "shapes": ("exhaustive",),
    "relearns": ("exhaustive",),
    "learns": ("exhaustive",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status of the command. `arguments`: without its name; default: those of this process."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _refuse(parser, options, _mode(parser, options))
    mutation = options.mutation
    if options.mutations:
        return _hunt([mutation] if mutation else HUNTED, options.first, options.record)
    if options.rewrite:
        return _rewrite(options.rewrite)
    if options.exhaustive is not None:
        return exhaustive.main(_script(options))
    if options.seeds is not None or options.seconds is not None:
        return _search(options)
    try:
        if options.replay is not None and '"choices"' in options.replay:
            return _follow(msgspec.json.decode(options.replay, type=exhaustive.Script))
        schedule = schedule_of(options.seed, options.kinds) if options.replay is None else _read(options.replay)
    except (OSError, ValueError, KeyError, IndexError) as error:
        parser.error(f"--replay {options.replay}: {error}")
    if options.shrink or options.record:
        return _shrink(schedule, mutation, options.record)
    return _show(schedule, mutation)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m relight.sim",
        description="Simulated jobs: the production controller and detector in virtual time, among workers that die, "
        "freeze and hang, over a network that delays, repeats and loses. Every run is judged by the invariants of "
        "docs/PROTOCOL.md, and can be repeated by its seed. See docs/SIMULATOR.md.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, metavar="N", help="run one random schedule and show what happens")
    what.add_argument("--seeds", type=int, metavar="N", help="run that many random schedules")
    what.add_argument("--seconds", type=float, metavar="S", help="run random schedules for so long")
    what.add_argument("--replay", metavar="WHAT", help="run a recorded schedule: a file, or the line of JSON itself")
    what.add_argument("--rewrite", nargs="+", type=Path, metavar="FILE", help="write recorded schedules anew")
    what.add_argument("--exhaustive", type=int, metavar="RANKS", help="try every order of events of a job of so many")
    what.add_argument("--mutations", action="store_true", help="hunt every planted bug")
    _add_search_options(parser)
    _add_exhaustive_options(parser)
    return parser


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first seed (default: 0)")
    parser.add_argument(
        "--with",
        dest="kinds",
        type=_words_of(KINDS),
        default=(),
        metavar="A,B",
        help="only random schedules with hosts (several), supply (hosts are ordered), fallback (buddy memory, "
        "checkpoints), flips (of bits), writes (steps with several) (default: each in some of them)",
    )
    parser.add_argument("--mutation", type=_mutation, metavar="NAME", help="plant this bug; alone, hunt it")
    parser.add_argument("--shrink", action="store_true", help="with --seed or --replay: make what fails small")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the (shrunk) schedule that was found here")
    parser.add_argument("--processes", type=int, metavar="N", help="to use at a time (default: one per processor)")


def _add_exhaustive_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="of --exhaustive (default: 2)")
    parser.add_argument("--faults", type=int, default=2, metavar="N", help="of --exhaustive (default: 2)")
    parser.add_argument(
        "--actions",
        type=_words_of(exhaustive.FAULTS),
        default=("kill",),
        metavar="A,B",
        help="of --exhaustive: kill, freeze, cut (default: kill)",
    )
    parser.add_argument(
        "--shapes",
        type=_words_of(SHAPES),
        default=(),
        metavar="A,B",
        help=f"of --exhaustive: of its steps, one after another: {', '.join(SHAPES)} (default: one)",
    )
    parser.add_argument(
        "--relearns",
        action="store_true",
        help="of --exhaustive: the first step after a recovery has its barrier at the end",
    )
    parser.add_argument(
        "--learns",
        action="store_true",
        help="of --exhaustive: ranks learn from their steps where the barrier stands; wants four steps or more",
    )
    parser.add_argument("--fine", action="store_true", help="of --exhaustive: tell more apart (only for small jobs)")


def _words_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a type of option: words with commas between them, each of them known."""

    def words(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if not set(given) <= set(known):
            raise argparse.ArgumentTypeError(f"{text}: there are {', '.join(known)}")
        return given

    return words


def _mutation(name: str) -> Mutation:
    names = [mutation.name for mutation in MUTATIONS]
    if name not in names:
        raise argparse.ArgumentTypeError(f"there is none of the name {name}; there are {', '.join(names)}")
    return find_mutation(name)


def _mode(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Return the mode that was asked for; exit with status 2 if none was. A mutation alone is hunted."""
    given = [mode for mode in _MODES if getattr(options, mode) is not parser.get_default(mode)]
    if not given and options.mutation is None:
        parser.error(f"one of these is required: {', '.join(f'--{mode}' for mode in _MODES)}, --mutation")
    if not given:
        options.mutations = True
    return given[0] if given else "mutations"


def _refuse(parser: argparse.ArgumentParser, options: argparse.Namespace, mode: str) -> None:
    """Exit with status 2 if an option does not go with the mode, or a job has too few ranks."""
    for name, modes in _GOES_WITH.items():
        if mode not in modes and getattr(options, name) != parser.get_default(name):
            flag = "with" if name == "kinds" else name
            parser.error(f"--{flag} goes with {', '.join(f'--{other}' for other in modes)}, not with --{mode}")
    if options.exhaustive is not None and options.exhaustive < 2:
        parser.error(f"--exhaustive {options.exhaustive}: at least 2 ranks")


def _script(options: argparse.Namespace) -> exhaustive.Script:
    """Return the job of an exhaustive search."""
    return exhaustive.Script(
        ranks=options.exhaustive,
        steps=options.steps,
        faults=options.faults,
        kinds=options.actions,
        choices=(),
        fine=options.fine,
        mutation=_name(options.mutation),
        shapes=options.shapes,
        relearns=options.relearns,
        learns=options.learns,
    )


def _name(mutation: Mutation | None) -> str:
    return mutation.name if mutation is not None else ""


def _read(what: str) -> Schedule:
    return decode_schedule(what) if what.lstrip().startswith("{") else read_golden(Path(what)).schedule


def _breaks(schedule: Schedule, mutation: Mutation | None) -> Violation | None:
    if mutation is not None:
        return mutation.breaks(schedule)
    try:
        SimulatedJob(schedule).run()
    except Violation as violation:
        return violation
    return None


def _breaks_only_so(schedule: Schedule, mutation: Mutation | None) -> Violation | None:
    """Return the invariant that only the mutation breaks; without a mutation, the one that production breaks."""
    violation = _breaks(schedule, mutation)
    return None if mutation is not None and violation is not None and _breaks(schedule, None) else violation


def _show(schedule: Schedule, mutation: Mutation | None) -> int:
    with mutation.planted() if mutation is not None else contextlib.nullcontext(PRODUCTION) as parts:
        job = SimulatedJob(schedule, parts)
        try:
            job.run()
        except Violation as violation:
            print(violation)
            return 1
    print(job.explain())
    return 0


def _follow(script: exhaustive.Script) -> int:
    mutation = find_mutation(script.mutation) if script.mutation else None
    with mutation.planted() if mutation is not None else contextlib.nullcontext(PRODUCTION) as parts:
        try:
            print(script.follow(parts))
        except Violation as violation:
            print(violation)
            return 1
    return 0


def _shrink(schedule: Schedule, mutation: Mutation | None, record: Path | None) -> int:
    violation = _breaks(schedule, mutation)
    if violation is None:
        print("no invariant breaks in this schedule: there is nothing to shrink", file=sys.stderr)
        return 2
    small = shrink(schedule, lambda candidate: _breaks_only_so(candidate, mutation))
    print(f"replay it with: python -m relight.sim --replay '{encode_schedule(small)}'\n")
    print(_breaks(small, mutation))
    if record is not None:
        what = mutation.what if mutation is not None else str(violation).partition("\n")[0]
        golden = Golden(what=_one_line(what), mutation=_name(mutation), schedule=small)
        record.write_text(format_golden(rewritten(golden) if mutation is not None else golden))
    return 1


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _search(options: argparse.Namespace) -> int:
    first, count, seconds = options.first, options.seeds, options.seconds

    def progress(found: Found) -> None:
        """Show the progress and the time left, on a terminal."""
        by_count = (count - found.schedules) / found.per_second if count and found.per_second else None
        left = seconds - found.seconds if seconds is not None else by_count
        words = f"\r{found.schedules:,} schedules, {len(found.violations)} violations"
        if left is not None:
            words += f", about {duration(max(0.0, left))} left"
        if sys.stderr.isatty():
            print(f"{words:79}", end="", file=sys.stderr)

    found = search(
        first,
        10**9 if count is None else count,
        seconds=seconds,
        mutation=_name(options.mutation),
        kinds=options.kinds,
        processes=options.processes,
        progress=progress,
    )
    if sys.stderr.isatty():
        print(f"\r{'':79}\r", end="", file=sys.stderr)
    print(
        f"{found.schedules:,} schedules from seed {first} on in {found.seconds:.1f} s "
        f"({found.per_second:,.0f} a second): {len(found.violations)} violations"
    )
    narrowed = f" --with {','.join(options.kinds)}" if options.kinds else ""
    for seed, violation in list(found.violations.items())[:20]:
        print(f"  --seed {seed}{narrowed}: {violation}")
    return 1 if found.violations else 0


def _hunt(mutations: Sequence[Mutation], first: int, record: Path | None) -> int:
    missed = 0
    for mutation in mutations:
        if not mutation.within:
            print(f"{mutation.name:32} too rare to be hunted: tests/sim/regressions/{mutation.name}.txt shows it")
            continue
        found = mutation.hunt(first)
        if found is None:
            missed += 1
            print(f"{mutation.name:32} not found by {mutation.within} schedules", flush=True)
            continue
        count, violation = found
        print(f"{mutation.name:32} {count:6}  {str(violation).partition(chr(10))[0]}", flush=True)
        if record is not None:
            _shrink(mutation.schedule(first + count - 1), mutation, record)
    return 1 if missed else 0


def _rewrite(paths: Sequence[Path]) -> int:
    for path in paths:
        path.write_text(format_golden(rewritten(read_golden(path))))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or the reader is gone
        sys.stderr.close()
        sys.exit(130)
