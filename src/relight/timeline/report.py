"""A job's report as tables that people read. Pure: from a value to something rich can print."""

from collections.abc import Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from relight.core.account import verdict
from relight.core.account.report import FailureReport, JobReport, PublishReport, RecoveryReport, RecoveryStages
from relight.timeline.draw.terminal import duration
from relight.words import count

_STAGES = tuple(name.removesuffix("_seconds") for name in RecoveryStages.__struct_fields__)


def render_report(report: JobReport) -> RenderableType:
    """Return the failures, the recoveries with the time of each stage, and the totals."""
    parts: list[RenderableType] = [_headline(report), Text()]
    if report.failures:
        parts += [_failures(report.failures), Text()]
    if report.recoveries:
        parts += [
            _recoveries(report.recoveries),
            Text(),
            _reasons(report.recoveries),
            Text(),
            _stage_seconds(report.recoveries),
            Text(),
        ]
    if report.notices:
        parts += [_notices(report.notices), Text()]
    parts.append(_totals(report))
    return Group(*parts)


def plain(text: str) -> str:
    """`text` without anything a terminal would obey: evidence may quote what a script printed."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def describe_recovery(report: JobReport, recovery: RecoveryReport) -> str:
    """One recovery in a sentence or two."""
    failures = [f for f in report.failures if f.number in recovery.failures]
    lost = " and ".join(_describe_failure(f) for f in failures) or "a failure"
    decision = {
        "forward": f"forward to version {recovery.target_version}",
        "back": f"back to version {recovery.target_version}, the step was repeated",
        "as they are": f"all were at version {recovery.target_version}",
    }.get(recovery.decision, f"{recovery.decision}, version {recovery.target_version}")
    if recovery.tier != "replica":
        decision = (
            f"back to version {recovery.target_version} from the {recovery.tier}, {recovery.steps_undone} finished "
            "steps were computed again"
        )
    if recovery.replaced:
        ranks = "rank" if len(recovery.replaced) == 1 else "ranks"
        numbers = ", ".join(map(str, recovery.replaced))
        decision += f"; {ranks} {numbers} taken over by a {recovery.replacement_kind}"
    time = duration(recovery.stages.total_seconds)
    return plain(f"Recovery {recovery.number} of {len(report.recoveries)}, {time}: {lost}; {decision}.")


def _describe_failure(failure: FailureReport) -> str:
    where = f" in {failure.phase} of step {failure.step}" if failure.phase else ""
    if failure.rank < 0:
        return f"{failure.process or 'the job'}: {failure.kind}"
    return f"rank {failure.rank} ({failure.process}): {failure.kind}{where}"


def headline_steps(report: JobReport) -> str:
    """Return the work and the time of a finished job, without steps before a checkpoint from which it started."""
    here, seconds = report.steps - report.began_at, duration(report.wall_seconds)
    if not report.began_at:
        return f"{count(here, 'step')} in {seconds}"
    if not here:
        return f"nothing left to do: the checkpoint is at step {report.began_at}, and {report.until} were asked for"
    return f"{count(here, 'step')} in {seconds}, from step {report.began_at} to step {report.steps}"


def _headline(report: JobReport) -> Text:
    text = Text()
    text.append(f"Job {plain(report.job)}: ", "bold")
    if report.error:
        text.append(f"{_how_it_ended(report)} after {count(report.steps, 'step')}.\n", "bold red")
        text.append(plain(report.error))
    else:
        text.append(f"{headline_steps(report)}.")
    if not report.failures:
        text.append(" Nothing failed." if not report.error else "")
    return text


def _failures(failures: Sequence[FailureReport]) -> Table:
    table = _table("Failures")
    table.add_column("#", justify="right")
    table.add_column("rank", justify="right")
    table.add_column("process", no_wrap=True)
    table.add_column("what", min_width=6)
    table.add_column("step", justify="right")
    table.add_column("phase", no_wrap=True)
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("noticed after", justify="right")
    table.add_column("evidence", ratio=1)
    for f in failures:
        table.add_row(
            str(f.number),
            str(f.rank) if f.rank >= 0 else "–",
            _text(f.process) if f.process else "–",
            _text(f.kind),
            str(f.step) if f.step >= 0 else "–",
            _text(f.phase) if f.phase else "–",
            duration(f.noticed_seconds),
            _noticed_after(f),
            _text(f.evidence),
        )
    return table


def _noticed_after(failure: FailureReport) -> str:
    if failure.detect_seconds is None:
        return "–"
    return ("about " if failure.estimated else "") + duration(failure.detect_seconds)


def _recoveries(recoveries: Sequence[RecoveryReport]) -> Table:
    table = _table("Recoveries")
    table.add_column("#", justify="right")
    table.add_column("of failure")
    table.add_column("decision")
    table.add_column("version", justify="right")
    table.add_column("replaced")
    table.add_column("by")
    table.add_column("copied from")
    table.add_column("moved", justify="right", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    for r in recoveries:
        restarts = f" (restarted {r.restarts}×)" if r.restarts else ""
        repeated = ", step repeated" if r.steps_repeated else ""
        if r.tier != "replica":
            repeated = f" from {r.tier}, {r.steps_undone} steps undone"
        table.add_row(
            str(r.number),
            _numbers(r.failures),
            _text(r.decision + repeated + restarts),
            str(r.target_version),
            _numbers(r.replaced),
            _text(r.replacement_kind),
            _numbers(r.sources),
            _bytes(r.moved_bytes),
            duration(r.stages.total_seconds),
        )
    return table


def _reasons(recoveries: Sequence[RecoveryReport]) -> Table:
    """Sentences, which a column beside so many others would break into single words."""
    table = _table("Why")
    table.add_column("#", justify="right")
    table.add_column("the decision", ratio=1)
    for r in recoveries:
        table.add_row(str(r.number), _text("; ".join(filter(None, (r.reason, describe_writes(r))))))
    return table


def describe_writes(recovery: RecoveryReport) -> str:
    """Return the fate of the writes of survivors in the interrupted step; empty if there were none."""
    said = []
    if torn := recovery.torn:
        said.append(f"a write of {_ranks(torn)} was cut short, and what it held was replaced")
    if wrote := sorted(set(recovery.wrote) - set(recovery.torn)):
        undone = recovery.decision == "back"
        said.append(f"{_ranks(wrote)} had begun to write: " + ("it was undone" if undone else "it was finished"))
    return "; ".join(said)


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {_numbers(numbers)}"


def _stage_seconds(recoveries: Sequence[RecoveryReport]) -> Table:
    """A column per stage that took time in any recovery; medians below if there are several."""
    values = {
        stage: [getattr(r.stages, f"{stage}_seconds") for r in recoveries]
        for stage in _STAGES
        if stage in {"detect", "total"} or any(getattr(r.stages, f"{stage}_seconds") > 0 for r in recoveries)
    }
    table = _table("Seconds of each stage", show_footer=len(recoveries) > 2)
    table.add_column("#", justify="right", footer="median")
    for stage, seconds in values.items():
        known = [s for s in seconds if s is not None]
        footer = f"{median(known):.3f}" if known else "–"
        table.add_column(stage, justify="right", no_wrap=True, footer=footer)
    for index, recovery in enumerate(recoveries):
        cells = (values[stage][index] for stage in values)
        table.add_row(str(recovery.number), *("–" if s is None else f"{s:.3f}" for s in cells))
    return table


def _notices(notices: Sequence[str]) -> Text:
    return Text("\n").join([Text("Notices", "bold"), *(Text("- " + plain(notice)) for notice in notices)])


def _totals(report: JobReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.title = "Totals"
    table.title_justify, table.title_style = "left", "bold"
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    lost = duration(report.time_lost_seconds)
    if report.wall_seconds > 0:
        lost += f" ({report.time_lost_seconds / report.wall_seconds:.2%} of the job)"
    standbys = f", {count(report.standbys, 'standby')}" if report.standbys else ""
    rows = {
        "ranks": f"{report.world_size}{standbys}",
        "steps": f"{report.steps} of {report.until}" if report.until >= report.steps else str(report.steps),
        "of which here": str(report.steps - report.began_at) if report.began_at else "",
        "failures": str(len(report.failures)),
        "recoveries": str(len(report.recoveries)),
        "steps repeated": str(report.steps_repeated),
        "state moved": _bytes(report.moved_bytes),
        "published": _published(report.published) if report.published is not None else "",
        "time lost": lost,
        "final version": str(report.final_version),
        "state digest": report.final_state_digest,
        "lineage": report.final_lineage,
        "cut collectives": str(report.cut_collectives) if report.cut_collectives else "",
        verdict.TITLE: verdict.describe_bits(report),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(report.versions.items())),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, _text(value))
    return table


def _published(published: PublishReport) -> str:
    engines = ", ".join(f"{name} has {version}" for name, version in sorted(published.engines.items()))
    updates = f"{count(published.updates, 'version')} ({_bytes(published.updates_bytes)})"
    return f"{updates}; {engines or 'no engine is connected'}"


def _table(title: str, show_footer: bool = False) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        footer_style="dim",
        show_footer=show_footer,
        box=None,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )


def _text(value: str) -> str:
    return escape(plain(value))


def _numbers(numbers: Sequence[int]) -> str:
    """Numbers in words short enough for a table: runs are joined."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs) or "–"


def _bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95 or unit == "TiB":
            return f"{value:.1f} {unit}"
    raise AssertionError("unreachable")


def _how_it_ended(report: JobReport) -> str:
    return "was stopped" if report.error.startswith("stopped") else "ended with an error"
