"""A job's numbers for Prometheus. Pure.

Counters are worked out from the journal with every scrape, so neither another controller nor another dashboard sets
one back. For that, a thing is counted once it is settled: a failure when its kind is known, a recovery when all ranks
have committed a step. There are no labels for steps, processes or pids, which would be new series forever.
"""

from collections import Counter
from collections.abc import Mapping

from relight.core.account.report import ENDED, PublishReport, RecoveryReport, RecoveryStages
from relight.core.controller import Stage
from relight.dashboard.model.exposition import Exposition
from relight.dashboard.model.job import Job

RECOVERY_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STAGES = tuple(name.removesuffix("_seconds") for name in RecoveryStages.__struct_fields__ if name != "total_seconds")


def exposition(job: Job, now_ns: int, silent_seconds: float, rss_bytes: Mapping[str, int]) -> str:
    """Everything, as Prometheus reads it.

    Args:
        now_ns: time since the job's start.
        silent_seconds: since its controller last gave a sign of life.
        rss_bytes: memory of processes on this host, by name.
    """
    out = Exposition()
    _add_job(out, job, now_ns, silent_seconds)
    _add_reserve(out, job)
    _add_losses(out, job)
    _add_ranks(out, job, rss_bytes)
    _add_weights(out, job)
    return out.text()


def _add_job(out: Exposition, job: Job, now_ns: int, silent_seconds: float) -> None:
    settings, ended = job.settings, job.ended
    names = ({"run": settings.job, "script": settings.script}, 1) if settings is not None else ({"run": ""}, 1)
    out.gauges("relight_job_info", "The job's name and script; the value is always 1.", [names])
    out.gauge("relight_job_start_timestamp_seconds", "When the job began (Unix time).", job.origin_ns / 1e9)
    out.gauge("relight_job_age_seconds", "Time since the job began; of one that is over, its length.", now_ns / 1e9)
    out.gauge("relight_job_ended", "1 once the job has ended, in whatever way.", int(ended is not None))
    out.gauge("relight_job_failed", "1 if it ended with an error.", int(ended is not None and bool(ended.error)))
    out.gauge(
        "relight_controller_silence_seconds",
        "Since the controller last touched its journal; it does so every 5 seconds while it lives.",
        silent_seconds if ended is None else 0,
    )
    stages = [({"stage": stage.value}, int(job.stage == stage.value)) for stage in Stage]
    out.gauges("relight_stage", "1 for what the controller is doing.", stages)
    out.gauge("relight_generation", "Goes up with each recovery.", job.generation)
    out.gauge("relight_steps_wanted", "Steps that the job is to take; 0: not known yet.", job.report().until)
    out.counter("relight_steps_total", "Optimizer steps applied to the state, repeated ones counted once.", job.steps)
    restarts = job.report().controller_restarts
    out.counter("relight_controller_restarts_total", "Controllers that died and were replaced.", restarts)


def _add_reserve(out: Exposition, job: Job) -> None:
    settings = job.settings
    out.gauge("relight_ranks", "Ranks of the job.", settings.world_size if settings else 0)
    out.gauge("relight_ranks_intact", "Ranks that live and hold the state; all but one may fail at once.", job.intact())
    reserve = job.standbys()
    ready = sum(process.ready for process in reserve)
    out.gauges(
        "relight_standbys",
        "Processes in reserve.",
        [({"state": "ready"}, ready), ({"state": "starting"}, len(reserve) - ready)],
    )
    out.gauge("relight_standbys_wanted", "As many were asked for.", settings.standbys if settings else 0)


def _add_losses(out: Exposition, job: Job) -> None:
    failures = [found for found in job.report().failures if found.kind != ENDED or job.ended is not None]
    kinds = Counter(found.kind for found in failures)
    by_kind = [({"kind": kind}, kinds[kind]) for kind in sorted(kinds)]
    out.counters("relight_failures_total", "Failures by kind.", by_kind)
    recoveries = job.settled_recoveries()
    decisions = Counter((found.decision, found.replacement_kind) for found in recoveries)
    out.counters(
        "relight_recoveries_total",
        "Recoveries by decision, and by who took over the lost ranks.",
        [({"decision": what, "replacement": who}, decisions[what, who]) for what, who in sorted(decisions)],
    )
    out.histogram(
        "relight_recovery_seconds",
        "From a failure to training again.",
        RECOVERY_BOUNDS,
        [found.stages.total_seconds for found in recoveries],
    )
    out.counters(
        "relight_recovery_stage_seconds_total",
        "Time that recoveries spent in each stage.",
        [({"stage": stage}, _spent(recoveries, stage)) for stage in _STAGES],
    )
    repeated = [found for found in recoveries if found.steps_repeated]
    lost = sum(found.stages.total_seconds for found in recoveries) + _spent(repeated, "redo")
    out.counter("relight_lost_seconds_total", "Time lost to failures, steps computed again included.", lost)
    out.counter("relight_steps_repeated_total", "Steps that were computed again.", len(repeated))
    moved = sum(found.moved_bytes for found in recoveries)
    out.counter("relight_restored_bytes_total", "State copied to replacements.", moved)


def _spent(recoveries: list[RecoveryReport], stage: str) -> float:
    return float(sum(getattr(found.stages, f"{stage}_seconds") or 0.0 for found in recoveries))


def _add_ranks(out: Exposition, job: Job, rss_bytes: Mapping[str, int]) -> None:
    rows, holders = job.rows, job.processes()
    known = [(rank, row) for rank, row in rows.items() if row.step_seconds > 0]
    out.gauges(
        "relight_rank_step_seconds",
        "Time of a step on each rank, running mean.",
        [({"rank": rank}, row.step_seconds) for rank, row in known],
    )
    out.gauges(
        "relight_rank_forward_seconds",
        "Of which in forward, where a slow rank shows; in backward all wait for the slowest.",
        [({"rank": rank}, row.forward_seconds) for rank, row in known if row.forward_seconds > 0],
    )
    out.gauges(
        "relight_rank_resident_memory_bytes",
        "Memory of each rank's process, where it runs on the dashboard's host.",
        [({"rank": rank}, rss_bytes[process.name]) for rank, process in holders.items() if rss_bytes.get(process.name)],
    )


def _add_weights(out: Exposition, job: Job) -> None:
    published = job.publications.report() or PublishReport()
    out.counter("relight_published_updates_total", "Versions that some inference engine took.", published.updates)
    out.counter("relight_published_bytes_total", "Weights, in all these.", published.updates_bytes)
    out.counter("relight_publish_seconds_total", "Time that these updates took.", published.updates_seconds)
    out.gauges(
        "relight_engine_version",
        "Version that each connected inference engine answers with; -1: none yet.",
        [({"engine": name}, version) for name, version in sorted(published.engines.items())],
    )
    restoring = job.restoring()
    total = sum(each.total_bytes for each in restoring)
    out.gauge("relight_restoring_bytes", "State to be copied in the recovery under way.", total)
    out.gauge("relight_restoring_copied_bytes", "Of which is there.", sum(r.copied_bytes for r in restoring))
