"""A job's status as text that people read. Pure: from a value to something rich can print."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relight.core.controller import Stage
from relight.core.recovery.decision import describe_target
from relight.timeline.draw.terminal import duration
from relight.timeline.report import plain
from relight.transfer.plan.manifest import describe_bytes
from relight.transfer.plan.update.progress import describe_publishing, describe_restores
from relight.watch.run_dir import State
from relight.watch.status import RankLine, Status
from relight.words import count

_COLOURS = {State.RUNNING: "green", State.FINISHED: "green", State.FAILED: "red", State.LOST: "red"}
_PHASE_COLOURS = {"DEAD": "bold red", "PARKED": "yellow"}
_RECOVERING = (Stage.STOPPING, Stage.RESTORING)
MAX_LISTED = 32  # ranks in `relight status`
QUIET_SECONDS = 15.0  # without a sign of life: worth saying


def head(status: Status) -> RenderableType:
    """All but the ranks."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    for name, words in _facts(status):
        table.add_row(name, Text(plain(words)))
    return Group(_title(status), table)


def _title(status: Status) -> Text:
    title = Text(f"Job {plain(status.job) or '(no name yet)'}: ", "bold")
    title.append(status.state.value, f"bold {_COLOURS[status.state]}")
    if status.state is State.RUNNING and status.stage:
        title.append(f", {status.stage}")
    return title


def _facts(status: Status) -> list[tuple[str, str]]:
    found = [("step", _steps(status)), ("time", _time(status))]
    if status.state is State.RUNNING:
        asked = count(status.standbys_asked, "standby", "standbys")
        ready = f"{status.standbys_ready} of {asked} ready" if status.standbys_asked else "no standbys"
        more = f"{count(status.may_fail, 'more rank')} may fail at once"
        found.append(("reserve", f"{ready}; {more}"))
    if status.hosts:
        found.append(("hosts", status.hosts))
    if status.waiting:
        found.append(("waiting", status.waiting.removeprefix("waiting ")))
    if restoring := describe_restores(status.restoring):
        found.append(("restoring", restoring.removeprefix("restoring ")))
    found += _engines(status)
    if status.last_failure is not None:
        failure = status.last_failure
        who = f"rank {failure.rank}" if failure.rank >= 0 else failure.process or "the job"
        when = f", {duration(max(0.0, status.seconds - failure.noticed_seconds))} ago"
        ago = when if status.state is State.RUNNING else ""
        where = f" in {failure.phase} of step {failure.step}" if failure.phase else ""
        found.append(("last failure", f"{failure.number}: {who}{where}{ago}: {failure.evidence}"))
    if status.last_recovery is not None:
        recovery = status.last_recovery
        by = f", {recovery.replacement_kind}" if recovery.replacement_kind != "none" else ""
        took = duration(recovery.stages.total_seconds)
        found.append(("last recovery", f"{took}: {describe_target(recovery.decision, recovery.target_version)}{by}"))
    if status.bits:
        found.append(("bits as undisturbed", status.bits))
    if status.stragglers:
        found.append(("stragglers", ", ".join(f"rank {rank}" for rank in status.stragglers)))
    if status.error:
        found.append(("error", status.error))
    if status.state is State.LOST:
        found.append(
            (
                "lost",
                f"its journal has no end, and no controller has written it for {duration(status.silent_seconds)}: "
                "`relight run` was killed, or this host sees another disk. Resume from your own checkpoint",
            )
        )
    elif status.state is State.RUNNING and status.silent_seconds > QUIET_SECONDS:
        found.append(("silent", f"its controller gave no sign of life for {duration(status.silent_seconds)}"))
    if status.problem:
        found.append(("problem", status.problem))
    found.append(("files", status.run_dir))
    return found


def _engines(status: Status) -> list[tuple[str, str]]:
    """The inference engines that get weights from this job, and what is on its way to them."""
    publishing = status.publishing
    if publishing is None:
        return []
    have = ", ".join(f"{engine.name} has {engine.version}" for engine in publishing.engines)
    found = [("engines", have or "none is connected")]
    if status.state is State.RUNNING and (moving := describe_publishing(publishing)):
        found.append(("publishing", moving.removeprefix("publishing ")))
    return found


def _steps(status: Status) -> str:
    done = f"{status.version:,} of {status.until:,}" if status.until else f"{status.version:,}"
    speed = f", {status.steps_per_second:.3g} steps/s" if status.steps_per_second else ""
    left = f", about {duration(status.left_seconds)} left" if status.left_seconds else ""
    return done + speed + left


def _time(status: Status) -> str:
    ended = f"{duration(status.seconds)}, then it ended early"
    if not status.failures:
        return f"{duration(status.seconds)}, nothing failed" if status.state is not State.FAILED else ended
    if status.state is State.FAILED and not status.recoveries:
        return f"{ended}, by {count(status.failures, 'failure')}"
    share = f" (goodput {status.goodput:.2%})" if status.goodput is not None else ""
    repeated = f", {count(status.steps_repeated, 'step')} repeated" if status.steps_repeated else ""
    restarts = f", {count(status.controller_restarts, 'controller')} replaced" if status.controller_restarts else ""
    under_way = ", without the recovery under way" if status.stage in _RECOVERING else ""
    return (
        f"{duration(status.seconds)}, of which {duration(status.time_lost_seconds)} lost to "
        f"{count(status.failures, 'failure')}{share}{repeated}{restarts}{under_way}"
    )


def grid(lines: Sequence[RankLine]) -> Table:
    """A line for each rank."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rank", justify="right")
    table.add_column("host", no_wrap=True)
    table.add_column("pid", justify="right")
    table.add_column("phase", no_wrap=True, min_width=9)
    table.add_column("step", justify="right")
    table.add_column("version", justify="right")
    table.add_column("step time", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            str(line.rank),
            Text(plain(line.host) or "–"),
            str(line.pid) if line.pid else "–",
            Text(line.phase or "–", _PHASE_COLOURS.get(line.phase, "")),
            str(line.step) if line.step >= 0 else "–",
            str(line.version) if line.version >= 0 else "–",
            duration(line.step_seconds) if line.step_seconds else "–",
            "–" if line.rss_bytes is None else describe_bytes(line.rss_bytes),
        )
    return table


def whole(status: Status, most: int = MAX_LISTED) -> RenderableType:
    """Head and ranks; of many ranks those that stand out, and the first ones."""
    odd = {line.rank for line in status.ranks if line.phase in _PHASE_COLOURS} | set(status.stragglers)
    chosen = sorted(status.ranks, key=lambda line: (line.rank not in odd, line.rank))[:most]
    parts: list[RenderableType] = [head(status), Text(), grid(sorted(chosen, key=lambda line: line.rank))]
    left = len(status.ranks) - len(chosen)
    if left:
        parts.append(Text(f"{count(left, 'more rank')}: `relight top`, or --json", "dim"))
    return Group(*parts) if status.ranks else head(status)
