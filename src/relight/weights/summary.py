"""The cost of an update of weights, as lines of facts for people. Pure, without torch."""

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from relight.transfer.plan.cost import describe_seconds
from relight.transfer.plan.manifest import describe_bytes
from relight.transfer.plan.timings import Measured, Work
from relight.transfer.plan.update.result import Published
from relight.transfer.plan.update.way import Way
from relight.words import count

Fact = tuple[str, str]


def facts_of(result: Published, measured: Measured) -> list[Fact]:
    """One fact a line, each with its name; a name that holds for several lines is printed once."""
    what = f"version {result.version}, {describe_bytes(result.total_bytes)}"
    if result.buckets:
        size = describe_bytes(result.bucket_bytes)
        what += f" in {count(result.buckets, 'bucket')}" + (f" of {size}" if result.buckets > 1 else "")
    facts = [("update", what)]
    steps = (
        f"{describe_seconds(measured.ask_seconds)} to ask everyone",
        f"{describe_seconds(measured.move_seconds)} to move every bucket",
        f"{describe_seconds(measured.take_seconds)} until every engine answers with it",
    )
    facts.append(("total", f"{describe_seconds(result.seconds)}: {', '.join(steps)}"))
    if result.why:
        facts.append(("way", f"{result.way}: {result.why}"))
    facts += _named("lent" if result.way is Way.LENT else "written", (_describe(work) for work in measured.written))
    facts += _named("reloaded", (_describe(work) for work in measured.reloaded))
    if measured.written:
        facts.append(("overlap", f"engines reloaded during {measured.overlapped:.0%} of the time of writing"))
    facts.append(("have it", ", ".join(result.engines) or "no engine"))
    facts += _named("have not", (f"{name}: {why}" for name, why in sorted(result.dropped.items())))
    if result.error:
        facts.append(("failed", result.error))
    return facts


def table_of(facts: Iterable[Fact], encoding: str) -> Table:
    """Names to the left, the facts beside them, in what a terminal of that encoding can show."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="bold", min_width=9)
    table.add_column(overflow="fold")
    for name, words in facts:
        table.add_row(name, Text(printable(words, encoding)))
    return table


def printable(text: str, encoding: str) -> str:
    """A name from elsewhere must neither move the cursor nor be more than the terminal can show."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown.encode(encoding, "replace").decode(encoding)


def rate(nbytes: float, seconds: float) -> str:
    """ "1.6 GiB/s", of a time above 0."""
    return f"{describe_bytes(nbytes / seconds)}/s"


def _named(name: str, lines: Iterable[str]) -> Sequence[Fact]:
    return [("" if index else name, line) for index, line in enumerate(lines)]


def _describe(work: Work) -> str:
    again = f", {work.repeats} of them again" if work.repeats else ""
    speed = f", {rate(work.nbytes, work.seconds)}" if work.seconds > 0 else ""
    stages = count(work.buckets + work.repeats, "bucket")
    time = describe_seconds(work.seconds)
    return f"by {work.member}: {stages}{again}, {describe_bytes(work.nbytes)} in {time}{speed}"
