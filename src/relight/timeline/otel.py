"""A job as spans for OpenTelemetry: the job, its recoveries, their stages; failures are events of the job's span.

Needs `pip install 'relight[otel]'`. Ids follow from the job's name and start, so a job that is sent twice, or once
while it runs and again at its end, is one trace.
"""

import logging
from typing import TYPE_CHECKING, Any

import xxhash

from relight.core.account.report import FailureReport, JobReport, RecoveryReport
from relight.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

MISSING = "--otlp needs OpenTelemetry: pip install 'relight[otel]'"
Part = tuple[str, float, float]  # name, begin and end in seconds since the job's start


def send(report: JobReport, endpoint: str) -> str:
    """Send a job to an OTLP receiver (HTTP), such as http://localhost:4318; returns a sentence. Raises UsageError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise UsageError(MISSING) from None
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"--otlp {endpoint}: expected an address such as http://localhost:4318")
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # one line of ours, not one each attempt
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=10)
    return export(report, exporter, endpoint)


def export(report: JobReport, exporter: "SpanExporter", where: str) -> str:
    """Give a job's spans to an exporter; returns a sentence. Raises UsageError if it does not take them."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    spans = make_spans(report)
    try:
        if exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise UsageError(f"--otlp {where}: the spans were not accepted; does a collector listen there?")
    finally:
        exporter.shutdown()
    return f"Sent {len(spans)} spans to {where}, as trace {spans[0].context.trace_id:032x}."


def make_spans(report: JobReport) -> list["ReadableSpan"]:
    """The spans of a job, the job's own first. Raises UsageError without OpenTelemetry."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace import StatusCode
    except ImportError:
        raise UsageError(MISSING) from None

    origin_ns = round(report.started_wall * 1e9)
    resource = Resource.create({"service.name": "relight", "relight.job": report.job})
    provider = TracerProvider(resource=resource, id_generator=_ids(f"{report.job}/{origin_ns}"), shutdown_on_exit=False)
    tracer = provider.get_tracer("relight")
    found: list[ReadableSpan] = []

    def at(seconds: float) -> int:
        return origin_ns + round(seconds * 1e9)

    def begin(part: Part, context: Any, attributes: dict[str, Any]) -> Any:
        return tracer.start_span(part[0], context, start_time=at(part[1]), attributes=_plain(attributes))

    job = begin((f"job {report.job}", 0.0, report.wall_seconds), None, _of_job(report))
    found.append(job)
    inside = trace.set_span_in_context(job)
    for failure in report.failures:
        job.add_event("failure", _plain(_of_failure(failure)), timestamp=at(failure.struck_seconds))
    for recovery in report.recoveries:
        parts = stages_of(report, recovery)
        whole = begin((f"recovery {recovery.number}", parts[0][1], parts[-1][2]), inside, _of_recovery(recovery))
        found.append(whole)
        below = trace.set_span_in_context(whole)
        for part in parts:
            stage = begin(part, below, {})
            stage.end(at(part[2]))
            found.append(stage)
        whole.end(at(parts[-1][2]))
    if report.error:
        job.set_status(StatusCode.ERROR, report.error)
    job.end(at(report.wall_seconds))
    return found


def stages_of(report: JobReport, recovery: RecoveryReport) -> list[Part]:
    """One after the other: noticing, stopping, replacing, restoring, the first step. They fill the recovery."""
    failures = [failure for failure in report.failures if failure.number in recovery.failures]
    stages = recovery.stages
    noticed = min((failure.noticed_seconds for failure in failures), default=0.0)
    struck = noticed - (stages.detect_seconds or 0.0)
    resumed = struck + stages.total_seconds
    times = [struck, noticed]
    for seconds in (stages.stop_seconds, stages.replace_seconds + stages.decide_seconds):
        times.append(min(times[-1] + seconds, resumed))
    times += [max(resumed, times[-1]), max(resumed, times[-1]) + stages.redo_seconds]
    names = ("detect", "stop", "replace", "restore", "redo" if recovery.steps_repeated else "next step")
    return [(name, begin, end) for name, begin, end in zip(names, times, times[1:], strict=False) if end > begin] or [
        ("restore", struck, resumed)
    ]


def _of_job(report: JobReport) -> dict[str, Any]:
    return {
        "world_size": report.world_size,
        "standbys": report.standbys,
        "steps": report.steps,
        "steps_asked": report.until,
        "failures": len(report.failures),
        "recoveries": len(report.recoveries),
        "steps_repeated": report.steps_repeated,
        "time_lost_seconds": report.time_lost_seconds,
        "controller_restarts": report.controller_restarts,
    }


def _of_failure(failure: FailureReport) -> dict[str, Any]:
    return {
        "number": failure.number,
        "rank": failure.rank,
        "process": failure.process,
        "kind": failure.kind,
        "step": failure.step,
        "phase": failure.phase,
        "evidence": failure.evidence,
    }


def _of_recovery(recovery: RecoveryReport) -> dict[str, Any]:
    stages = {f"stage.{name}": getattr(recovery.stages, name) for name in type(recovery.stages).__struct_fields__}
    return {
        "generation": recovery.generation,
        "failures": list(recovery.failures),
        "decision": recovery.decision,
        "target_version": recovery.target_version,
        "reason": recovery.reason,
        "replaced": list(recovery.replaced),
        "replacement": recovery.replacement_kind,
        "steps_repeated": recovery.steps_repeated,
        "moved_bytes": recovery.moved_bytes,
        "restarts": recovery.restarts,
        **stages,
    }


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Under relight's own name; what is not known is left out."""
    return {f"relight.{name}": value for name, value in attributes.items() if value is not None}


def _ids(seed: str) -> Any:
    """Ids that follow from the seed."""
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Ids(IdGenerator):  # type: ignore[misc]
        def __init__(self) -> None:
            self._count = 0

        def generate_trace_id(self) -> int:
            return xxhash.xxh3_128_intdigest(seed.encode()) or 1

        def generate_span_id(self) -> int:
            self._count += 1
            return xxhash.xxh3_64_intdigest(f"{seed}/{self._count}".encode()) or 1

    return Ids()
