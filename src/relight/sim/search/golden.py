"""Recorded schedules: text files that say what once went wrong, how to see it, and what happens instead.

    what: a survivor that had long waited for a hung rank was killed for stopping a moment later
    mutation: blames-who-stops-later
    breaks: L3
    schedule: {"seed": ...}

       0.000  Spawn w0 rank 0
       ...

With the mutation planted, the schedule breaks that invariant; without it, exactly this happens. If the orders of the
core change on purpose, `python -m relight.sim --rewrite FILE...` writes the files anew; read the difference.
"""

from pathlib import Path

import msgspec

from relight.core.protocol import commands as cmd
from relight.sim.model.schedule import Schedule, decode_schedule, encode_schedule
from relight.sim.planted.mutations import find_mutation
from relight.sim.timed.job import SimulatedJob, run_schedule


class Golden(msgspec.Struct, frozen=True, kw_only=True):
    """One file."""

    what: str
    mutation: str = ""  # the one that brings the bug back; empty: none does any more
    breaks: str = ""  # the invariant that it then breaks
    schedule: Schedule
    trace: str = ""  # what happens without the mutation


def parse_golden(text: str) -> Golden:
    """The inverse of `format_golden`. Raises ValueError or msgspec.DecodeError (which is a ValueError)."""
    head, _, trace = text.partition("\n\n")
    fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    if "schedule" not in fields:
        raise ValueError("no line begins with `schedule: `")
    return Golden(
        what=fields.get("what", ""),
        mutation=fields.get("mutation", ""),
        breaks=fields.get("breaks", ""),
        schedule=decode_schedule(fields["schedule"]),
        trace=trace,
    )


def format_golden(golden: Golden) -> str:
    """The text of the file."""
    lines = [f"what: {golden.what}"]
    if golden.mutation:
        lines += [f"mutation: {golden.mutation}", f"breaks: {golden.breaks}"]
    lines += [f"schedule: {encode_schedule(golden.schedule)}", "", golden.trace]
    return "\n".join(lines)


def read_golden(path: Path) -> Golden:
    """Raises OSError or ValueError."""
    return parse_golden(path.read_text())


def rewritten(golden: Golden) -> Golden:
    """With what happens now. Raises Violation if production breaks an invariant."""
    breaks = ""
    if golden.mutation:
        violation = find_mutation(golden.mutation).breaks(golden.schedule)
        breaks = violation.invariant if violation is not None else "nothing"
    trace = describe(run_schedule(golden.schedule))
    return msgspec.structs.replace(golden, breaks=breaks, trace=trace)


def describe(job: SimulatedJob) -> str:
    """Faults and orders, a line each: what a reader needs, and little that changes for no good reason."""
    lines = []
    for now, what, thing in job.trace:
        if what == "FAULT":
            lines.append(f"{now:9.3f}  FAULT {thing}")
        elif what == "command" and not isinstance(thing, cmd.Notice):
            lines.append(f"{now:9.3f}  {_describe_command(thing)}")  # type: ignore[arg-type]
    return "\n".join(lines) + "\n"


def _describe_command(command: cmd.Command) -> str:
    match command:
        case cmd.Spawn():
            return f"Spawn {command.process} {'standby' if command.rank is None else f'rank {command.rank}'}"
        case cmd.Kill():
            return f"Kill {command.process}"
        case cmd.Assign():
            return f"Assign {command.process} rank {command.rank} generation {command.generation}"
        case cmd.Restore():
            sources = [source.rank for source in command.sources]
            what = f"to {command.target} attempt {command.attempt} from {sources} into {list(command.targets)}"
            return f"Restore generation {command.generation} {what}"
        case cmd.EndJob():
            return f"EndJob {command.error or 'training finished'}"
        case cmd.ReleaseHost() | cmd.RefuseDrain():
            return f"{type(command).__name__} {command.agent}"
        case cmd.OrderHost() | cmd.CancelHost():
            return f"{type(command).__name__} {command.order}"
        case cmd.Notice():
            return ""
    return f"{type(command).__name__} generation {command.generation}"
