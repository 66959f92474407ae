"""The state of a job, as one value for people and programs. Pure."""

from collections.abc import Mapping
from statistics import median

import msgspec

from relight.core.account.report import DoubtReport, FailureReport, RecoveryReport
from relight.core.account.verdict import describe_bits
from relight.dashboard.model import view
from relight.dashboard.model.job import Job
from relight.dashboard.model.stragglers import find_stragglers
from relight.watch.run import judge
from relight.watch.run_dir import State
from relight.wire.status import PublishStatus, RestoreStatus

FORMAT_VERSION = 1


class RankLine(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. `rss_bytes` is None where it is not known: of processes on other hosts, or that have ended."""

    rank: int
    process: str
    host: str
    pid: int
    phase: str  # a name of `Phase`, or DEAD: no process holds the rank
    step: int
    version: int
    step_seconds: float  # running mean
    rss_bytes: int | None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `relight status --json`. Times are seconds, moments are since the job's start."""

    format: int = FORMAT_VERSION
    job: str
    run_dir: str
    state: State
    stage: str  # of the controller: starting, training, stopping, restoring, saving, finishing, ended
    waiting: str  # whom the job waits for, and why; empty while it trains
    hosts: str  # how many are here, wanted and on order, and which are avoided; empty: nothing is to be said
    error: str  # why it failed
    problem: str  # why the journal could not be read further
    script: str
    world_size: int
    generation: int
    version: int  # steps that are done
    until: int  # steps that were asked for; 0: not known yet
    steps_per_second: float
    left_seconds: float | None  # at this speed
    seconds: float  # since the job's start; of one that is over, in all
    silent_seconds: float  # since its controller last gave a sign of life
    failures: int
    recoveries: int
    steps_repeated: int
    time_lost_seconds: float
    goodput: float | None
    bits: str  # whether they are those of an undisturbed run, in words; empty: nothing is to be said yet
    bits_as_undisturbed: str  # "yes" or "not known" of a job that finished; empty of any other
    doubts: tuple[DoubtReport, ...]  # why it is not known
    controller_restarts: int
    standbys_ready: int
    standbys_asked: int
    may_fail: int  # more ranks that may fail at once
    last_failure: FailureReport | None
    last_recovery: RecoveryReport | None
    stragglers: tuple[int, ...]
    restoring: tuple[RestoreStatus, ...]  # copies of the recovery under way
    publishing: PublishStatus | None  # the newest word of the process that publishes
    ranks: tuple[RankLine, ...]


def status_of(
    job: Job, run_dir: str, now_ns: int, silent_seconds: float, rss_bytes: Mapping[str, int] | None = None
) -> Status:
    """Return a job's status at `now_ns` since its start. `rss_bytes`: memory of processes on this host, by name."""
    report, settings = job.report(), job.settings
    state = judge(job, silent_seconds)
    memory = rss_bytes or {}
    seconds = now_ns / 1e9
    if state is State.LOST:  # the clock stopped with it
        seconds = max(0.0, seconds - silent_seconds)
    ranks = tuple(_line(line, memory) for line in view.ranks(job, memory).values())
    speed = _steps_per_second(ranks) if state is State.RUNNING and job.stage == "training" else 0.0
    # Of a job that has ended the account has the last word, as in every other tool.
    version = report.steps if job.ended is not None else max(job.version(), report.steps, 0)
    intact = job.intact() if state is State.RUNNING else 0
    return Status(
        job=settings.job if settings else "",
        run_dir=run_dir,
        state=state,
        stage=job.stage,
        waiting=job.waiting(now_ns) if state is State.RUNNING else "",
        hosts=job.hosts(now_ns) if state is State.RUNNING else "",
        error=job.ended.error if job.ended else "",
        problem=job.problem,
        script=settings.script if settings else "",
        world_size=settings.world_size if settings else 0,
        generation=job.generation,
        version=version,
        until=report.until,
        steps_per_second=round(speed, 3),
        left_seconds=(report.until - version) / speed if speed and report.until else None,
        seconds=round(seconds, 3),
        silent_seconds=round(silent_seconds, 1),
        failures=len(report.failures),
        recoveries=len(report.recoveries),
        steps_repeated=report.steps_repeated,
        time_lost_seconds=report.time_lost_seconds,
        goodput=max(0.0, 1 - report.time_lost_seconds / seconds) if seconds > 0 else None,
        bits=describe_bits(report),
        bits_as_undisturbed=report.bits_as_undisturbed,
        doubts=report.doubts,
        controller_restarts=report.controller_restarts,
        standbys_ready=sum(process.ready for process in job.standbys()) if state is State.RUNNING else 0,
        standbys_asked=settings.standbys if settings else 0,
        may_fail=max(0, intact - 1),
        last_failure=report.failures[-1] if report.failures else None,
        last_recovery=report.recoveries[-1] if report.recoveries else None,
        stragglers=tuple(rank for rank, _, _ in find_stragglers(job.rows)),
        restoring=tuple(job.restoring()) if state is State.RUNNING else (),
        publishing=job.publications.newest,
        ranks=ranks,
    )


def _line(line: view.Value, memory: Mapping[str, int]) -> RankLine:
    return RankLine(
        rank=line["rank"],
        process=line["process"],
        host=line["host"],
        pid=line["pid"],
        phase=line["phase"],
        step=line["step"],
        version=line["version"],
        step_seconds=line["step_ms"] / 1e3,
        rss_bytes=memory.get(line["process"]),
    )


def _steps_per_second(ranks: tuple[RankLine, ...]) -> float:
    """Return the rate by the time of a step, since there are no earlier samples: all ranks have the same pace."""
    known = [line.step_seconds for line in ranks if line.step_seconds > 0]
    return 1 / median(known) if known else 0.0
