"""The page's data about a job: a few topics, each a value for JSON. Pure."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from relight.core.account.report import FailureReport, RecoveryReport
from relight.core.account.verdict import describe_doubts
from relight.core.protocol.position import Phase
from relight.dashboard.model.job import Job
from relight.dashboard.model.row import Row
from relight.dashboard.model.stragglers import find_stragglers
from relight.wire.status import Gpu, RestoreStatus

Value = Any  # what JSON can say
SILENT_SECONDS = 15.0  # a controller touches its journal every five; then the page says that it is silent
_PHASES = {int(phase): phase.name for phase in Phase}


def is_silent(seconds: float) -> bool:
    """Return whether a job seems to have no controller, by the time since the last sign of life."""
    return SILENT_SECONDS < seconds < math.inf


def summary(job: Job, now_ns: int, silent_seconds: float) -> Value:
    """The head of the page."""
    settings, report = job.settings, job.report()
    if settings is None:
        return {"job": "", "problem": job.problem, "stage": "", "ended": False, "gap_ns": None}
    seconds = now_ns / 1e9
    lost = report.time_lost_seconds
    waiting = job.standbys()
    return {
        "job": settings.job,
        "script": settings.script,
        "run_dir": settings.run_dir,
        "problem": job.problem,
        "stage": job.stage,
        "waiting": job.waiting(now_ns),
        "silent_seconds": round(silent_seconds) if job.ended is None and is_silent(silent_seconds) else 0,
        "gap_ns": job.gap_ns(),
        "generation": job.generation,
        "world_size": settings.world_size,
        "until": report.until,
        "version": max(job.version(), 0),
        "steps_per_second": round(job.steps_per_second(), 3) if job.ended is None else 0.0,
        "seconds": round(seconds, 1),
        "failures": len(report.failures),
        "recoveries": len(report.recoveries),
        "steps_repeated": report.steps_repeated,
        "moved_bytes": report.moved_bytes,
        "time_lost_seconds": round(lost, 4),
        "goodput": round(max(0.0, 1 - lost / seconds), 6) if seconds > 0 else None,
        "bits": report.bits_as_undisturbed or ("not known" if report.doubts else ""),
        "doubts": describe_doubts(report.doubts) if report.doubts else "",
        "controller_restarts": report.controller_restarts,
        "standbys_ready": sum(process.ready for process in waiting),
        "standbys_starting": sum(not process.ready for process in waiting),
        "standbys_asked": settings.standbys,
        # Any of its holders may fail but the last one.
        "shards": [{"name": name, "copies": count, "may_fail": max(0, count - 1)} for name, count in job.copies()],
        "ended": job.ended is not None,
        "error": job.ended.error if job.ended is not None else "",
        "started_wall_ms": job.origin_ns // 1_000_000,
    }


def rank(number: int, row: Row, holder: str, host: str, pid: int, rss_bytes: int, *, dead: bool) -> Value:
    """One line of the grid of devices."""
    return {
        "rank": number,
        "process": holder or row.process,
        "host": host,
        "pid": pid,
        "phase": "DEAD" if dead else _PHASES.get(row.phase, ""),
        "since_ns": row.last_ns,
        "step": row.step,
        "version": row.version,
        "step_ms": round(row.step_seconds * 1e3, 1),
        "rss_bytes": rss_bytes,
    }


def ranks(job: Job, rss_bytes: Mapping[str, int]) -> dict[int, Value]:
    """All lines of the grid. `rss_bytes`: memory of processes on this host."""
    holders = job.processes()
    starting = job.stage in ("", "starting")
    lines = {}
    for number in job.rows:
        row = job.newest_row(number)
        process = holders.get(number)
        dead = job.ended is None and not starting and (process is None or process.gone)
        name, host, pid = ("", "", 0) if process is None else (process.name, process.agent, process.pid)
        line = rank(number, row, name, host, pid, rss_bytes.get(name, 0), dead=dead)
        gpu = None if process is None else job.gpu(process)
        lines[number] = line if gpu is None else {**line, "gpu": _gpu(gpu)}
    return lines


def _gpu(gpu: Gpu) -> Value:
    trouble = [f"{gpu.uncorrected_errors} uncorrected memory errors"] if gpu.uncorrected_errors else []
    trouble += ["slowed down by heat or lack of power"] if gpu.slowed else []
    return {
        "index": gpu.index,
        "name": gpu.name,
        "busy_share": gpu.busy_share,
        "used_bytes": gpu.memory_used_bytes,
        "total_bytes": gpu.memory_total_bytes,
        "celsius": gpu.temperature_celsius,
        "watts": gpu.power_watts,
        "trouble": ", ".join(trouble),
    }


def failure(job: Job, found: FailureReport) -> Value:
    """One failure, with the time in which no process held its rank."""
    until = job.dead_until_ns(found)
    return {
        "number": found.number,
        "rank": found.rank,
        "process": found.process,
        "kind": found.kind,
        "step": found.step,
        "phase": found.phase,
        "evidence": found.evidence,
        "has_stack": bool(found.stack),
        "struck_ns": round(found.struck_seconds * 1e9),
        "noticed_ns": round(found.noticed_seconds * 1e9),
        "detect_seconds": found.detect_seconds,
        "detect_evidence": found.detect_evidence,
        "estimated": found.estimated,
        "until_ns": until,
    }


def recovery(found: RecoveryReport, failures: Mapping[int, FailureReport]) -> Value:
    """One recovery with the seconds of each stage, and when it was."""
    answered = [failures[number] for number in found.failures if number in failures]
    struck = min((each.struck_seconds for each in answered), default=0.0)
    noticed = min((each.noticed_seconds for each in answered), default=struck)
    resumed = struck + found.stages.total_seconds
    return {
        "number": found.number,
        "failures": found.failures,
        "decision": found.decision,
        "target_version": found.target_version,
        "reason": found.reason,
        "replaced": found.replaced,
        "replacement_kind": found.replacement_kind,
        "sources": found.sources,
        "steps_repeated": found.steps_repeated,
        "moved_bytes": found.moved_bytes,
        "restarts": found.restarts,
        "stages": {
            name.removesuffix("_seconds"): value for name, value in msgspec.structs.asdict(found.stages).items()
        },
        "struck_ns": round(struck * 1e9),
        "noticed_ns": round(noticed * 1e9),
        "stopped_ns": round((noticed + found.stages.stop_seconds) * 1e9),
        "resumed_ns": round(resumed * 1e9),
        "ended_ns": round((resumed + found.stages.redo_seconds) * 1e9),
    }


def publishing(job: Job) -> Value:
    """Return the state of publications to engines; None if the job publishes nothing."""
    status, report = job.publications.newest, job.publications.report()
    if status is None or report is None:
        return None
    holder = job.processes().get(0)
    newest = job.version()
    gone = holder is None or holder.gone or holder.name != status.process
    return {
        "version": status.version,
        "moved_bytes": status.moved_bytes,
        "total_bytes": status.total_bytes,
        "seconds": round(status.update_seconds, 3),
        "updates": report.updates,
        "updates_bytes": report.updates_bytes,
        "updates_seconds": round(report.updates_seconds, 3),
        "error": status.error,
        "gone": status.process if gone and job.ended is None else "",  # the publisher, whose successor is yet to speak
        "engines": [
            {
                "name": each.name,
                "pid": each.pid,
                "version": each.version,
                "behind": max(0, newest - each.version),
            }
            for each in status.engines
        ],
        "dropped": [{"name": name, "why": why} for name, why in sorted(status.dropped.items())],
    }


def restore(status: RestoreStatus) -> Value:
    """A copy that is under way."""
    return {
        "rank": status.rank,
        "copied_bytes": status.copied_bytes,
        "total_bytes": status.total_bytes,
        "seconds": round(status.seconds, 2),
    }


def coverage(job: Job) -> Value:
    """Return the losses that are survived, by kind and tier, and the cost of each tier."""
    covered = job.coverage()
    if covered is None:
        return None
    return {
        "parts": len(covered.parts),
        "losses": [
            {
                "what": loss.what,
                "cases": loss.cases,
                "replicas": loss.survived,
                "buddies": loss.from_buddies,
                "rest": loss.fatal - loss.from_buddies,
                "examples": list(loss.examples),
            }
            for loss in covered.losses
        ],
        "tiers": [msgspec.to_builtins(cost) for cost in covered.tiers],
    }


def topics(job: Job, now_ns: int, silent_seconds: float = 0.0) -> dict[str, Value]:
    """Everything but the ranks. `silent_seconds`: since the controller last gave a sign of life."""
    report = job.report()
    by_number = {each.number: each for each in report.failures}
    return {
        "summary": summary(job, now_ns, silent_seconds),
        "publishing": publishing(job),
        "restores": [restore(each) for each in job.restoring()],
        "failures": [failure(job, each) for each in job.failures()],
        "recoveries": [recovery(each, by_number) for each in job.recoveries()],
        "notices": [{"seconds": round(at, 3), "level": level, "text": text} for at, level, text in job.notices],
        "coverage": coverage(job),
        "stragglers": [
            {"rank": number, "forward_seconds": seconds, "median_seconds": median}
            for number, seconds, median in find_stragglers(job.rows)
        ],
    }
