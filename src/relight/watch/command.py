"""The commands that show a run from its files: `relight status`, `relight top`, `relight events`. No torch."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from relight.watch.run_dir import EXIT_STATUS, State, find_run

_STATES = "exit status: 0 finished, 1 failed, 3 running, 4 lost (no controller runs it), 2 wrong command line"


def add_commands(choices: "argparse._SubParsersAction[Any]") -> None:
    """Add them."""
    status = choices.add_parser(
        "status",
        help="show whether a job is running, finished, failed or lost",
        description="Show the state of a job and its ranks, from the files in its run directory, on any host that "
        "sees them.",
        epilog=_STATES,
    )
    status.add_argument("--json", action="store_true", help="print everything as JSON instead, with every rank")
    status.set_defaults(call=_status)
    top = choices.add_parser(
        "top",
        help="show the ranks of a job, live in the terminal",
        description="Show what each rank does, live, from the files in its directory; q leaves. Without a terminal: "
        "once.",
    )
    top.set_defaults(call=_top)
    events = choices.add_parser(
        "events",
        help="print the events of a job as JSON lines for programs",
        description="Print what happened, one JSON object a line: failures, recoveries with their stages, processes, "
        "notices. Names and units are stable: docs/WATCHING.md.",
    )
    events.add_argument("--follow", action="store_true", help="continue until the job ends; also wait for its start")
    events.add_argument("--schema", action="store_true", help="print the JSON schema of an event instead")
    events.set_defaults(call=_events)
    for parser in (status, top, events):
        add_run_dir(parser)


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """RUN_DIR, or nothing: the newest run."""
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        nargs="?",
        type=Path,
        help="the directory of the run; default: the newest in runs/",
    )


def _status(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from relight.watch.run import Run
    from relight.watch.tables import whole
    from relight.watch.top import Looker

    status = Looker(Run(find_run(arguments.run_dir))).look()
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
    else:
        Console().print(whole(status), highlight=False)
    return EXIT_STATUS[status.state]


def _top(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from relight.watch import top
    from relight.watch.run import Run

    run = Run(find_run(arguments.run_dir))
    if not top.is_terminal():
        state = top.print_once(run, Console())
        return 0 if state in (State.RUNNING, State.FINISHED) else 1
    top.show(run)
    return 0


def _events(arguments: argparse.Namespace) -> int:
    from relight.watch.events import schema
    from relight.watch.feed import write_events

    output = sys.stdout.buffer
    if arguments.schema:
        output.write(schema())
        return 0
    comes = arguments.follow and arguments.run_dir is not None
    run_dir = arguments.run_dir if comes else find_run(arguments.run_dir)

    def write(line: bytes) -> None:
        output.write(line)
        if arguments.follow:
            output.flush()

    try:
        is_whole = write_events(run_dir, write, follow=arguments.follow)
        output.flush()
    except BrokenPipeError:  # the reader went away (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes nowhere
        return 0
    if not is_whole:
        print(f"relight: {run_dir}: no controller runs this job, and its journal has no end", file=sys.stderr)
        return EXIT_STATUS[State.LOST]
    return 0
