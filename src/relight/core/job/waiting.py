"""Describe, for people, the ranks that a job waits for while it does not train, and why. Takes no decisions."""

from collections.abc import Collection, Sequence

from relight.core.job.job import Job, Stage
from relight.core.membership.backoff import Backoff
from relight.core.membership.members import Members, Process

_NAMED = 4  # ranks that are named; more are counted


def describe(job: Job, entered: Collection[str], backoff: Backoff, now: float) -> str:
    """Describe the wait of the stage that the job is in. `entered`: processes that have reached their first step."""
    members, settings = job.members, job.settings
    if job.stage is Stage.STOPPING and now < backoff.until:
        return for_next_attempt(members, settings.world_size, backoff, settings.max_failed_attempts, now)
    match job.stage:
        case Stage.STARTING:
            return for_first_step(members, entered, len(job.hosts), settings.nodes, now)
        case Stage.STOPPING:
            return to_decide(members, job.attempt.stopped, settings.world_size, now)
        case Stage.RESTORING:
            return to_resume(members, job.attempt.restored, job.job_stats.recoveries.decided_at, now)
        case Stage.SAVING:
            return "the job must end: a last checkpoint is written"
        case Stage.FINISHING:
            return for_ends(members)
    return ""


def for_first_step(members: Members, entered: Collection[str], hosts: int, nodes: int, now: float) -> str:
    """Explain a wait before training: for missing hosts, then for ranks whose script has not reached its first step."""
    if not members.processes:
        missing = nodes - hosts
        return f"waiting for {missing} {'host' if missing == 1 else 'hosts'} to join" if missing > 0 else ""
    late = [(rank, process) for rank, process in members.by_rank().items() if process.name not in entered]
    if not late:
        return ""
    seconds = now - min(process.spawned_at for _, process in late)
    return f"waiting for {_ranks([rank for rank, _ in late])} to reach the first step, for {seconds:.0f} s"


def to_decide(members: Members, stopped: Collection[str], world_size: int, now: float) -> str:
    """Between Stop and the decision: a process for every rank, and a pause of every healthy one."""
    vacant = members.vacant(world_size)
    if vacant:
        return f"waiting for a replacement of {_ranks(vacant)}: {_coming(members.standbys(), now)}"
    dying = members.dying()
    if dying:
        ranks = sorted({process.rank for process in dying if process.rank is not None})
        return f"waiting until the failed process of {_ranks(ranks) or 'no rank'} has certainly ended"
    moving = [(rank, process) for rank, process in members.by_rank().items() if process.name not in stopped]
    if not moving:
        return ""
    seconds = now - min(process.asked_at for _, process in moving)
    return f"waiting for {_ranks([rank for rank, _ in moving])} to pause, for {seconds:.1f} s"


def for_next_attempt(members: Members, world_size: int, backoff: Backoff, limit: int | None, now: float) -> str:
    """Explain a wait after several failed attempts in a row. `limit`: the most attempts."""
    vacant = members.vacant(world_size)
    what = f"start a replacement of {_ranks(vacant)}" if vacant else "restore the replacements"
    ends = "--max-failed-attempts N would end that" if limit is None else f"--max-failed-attempts {limit}"
    return (
        f"{backoff.failed} attempts in a row have failed; the next one to {what} begins in {backoff.until - now:.0f} s "
        f"(the first failed {now - backoff.since:.0f} s ago; the last: {backoff.last}; {ends})"
    )


def _coming(standbys: Sequence[Process], now: float) -> str:
    """The process that will take a vacant rank; a warm standby would have taken it at once."""
    if not standbys:
        return "no host has room for a process"
    first = min(standbys, key=lambda process: process.spawned_at)
    seconds = now - first.spawned_at
    why = "no standby was left" if first.fresh else "the standby was not warm yet"
    if not first.started:
        return f"{why}; a process was ordered from {first.agent} {seconds:.0f} s ago"
    return f"{why}; process {first.pid} on {first.agent} has been starting for {seconds:.0f} s"


def to_resume(members: Members, restored: Collection[str], decided: float, now: float) -> str:
    """Between the decision and Resume: ranks that do not hold the agreed version yet."""
    late = [rank for rank, process in members.by_rank().items() if process.name not in restored]
    if not late:
        return ""
    return f"waiting for {_ranks(late)} to hold the agreed version, for {now - decided:.1f} s"


def for_ends(members: Members) -> str:
    """Explain a wait after training: for scripts that have not run to their ends."""
    alive = [p.rank for p in members.processes.values() if p.alive and not p.failed and p.rank is not None]
    return f"waiting for the script of {_ranks(sorted(alive))} to end" if alive else ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= 1:
        return f"rank {ranks[0]}" if ranks else ""
    if len(ranks) > _NAMED:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:_NAMED]))}, ...)"
    return f"ranks {', '.join(map(str, ranks))}"
