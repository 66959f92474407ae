"""An update of weights as a trace: a track for each source and each engine, and what was planned. Pure, no torch."""

from collections.abc import Iterator, Sequence

from relight.timeline.draw.perfetto import Slice, encode_trace
from relight.transfer.plan.cost import Span
from relight.transfer.plan.plan import Bucket
from relight.transfer.plan.schedule import Kind, Schedule
from relight.transfer.plan.timings import Measured, stages_of
from relight.transfer.plan.update.result import Published, Stage


def trace_of(
    result: Published, measured: Measured, buckets: Sequence[Bucket], schedule: Schedule, spans: Sequence[Span]
) -> bytes:
    """Chrome's trace events as JSON: the update from its beginning as it was measured, and `schedule` below it."""
    begun_ns = result.started_ns + round(measured.ask_seconds * 1e9)
    return encode_trace(
        {
            "measured": [*_steps(result, measured), *_stages(result, buckets)],
            "planned, with the measured means": list(_planned(schedule, spans, begun_ns)),
        },
        result.started_ns,
    )


def _steps(result: Published, measured: Measured) -> Iterator[Slice]:
    """The whole, and its three parts."""
    track, start_ns = "update", result.started_ns
    end_ns = start_ns + round(result.seconds * 1e9)
    begun_ns = start_ns + round(measured.ask_seconds * 1e9)
    moved_ns = begun_ns + round(measured.move_seconds * 1e9)
    details = {
        "bytes": result.total_bytes,
        "buckets": result.buckets,
        "engines": ", ".join(result.engines),
        **{f"not {name}": why for name, why in sorted(result.dropped.items())},
        **({"error": result.error} if result.error else {}),
    }
    yield Slice(track, f"version {result.version}", start_ns, end_ns, details)
    yield Slice(track, "ask", start_ns, begun_ns)
    yield Slice(track, "move", begun_ns, moved_ns)
    yield Slice(track, "take", moved_ns, end_ns)


def _stages(result: Published, buckets: Sequence[Bucket]) -> Iterator[Slice]:
    writes, reloads = stages_of(result, "broadcast"), stages_of(result, "reload")
    commits = [stage for stage in result.stages if stage.kind == "commit"]
    for word, role, stages in (
        ("write", "source", writes),
        ("reload", "engine", sorted(reloads, key=lambda stage: stage.member)),
        ("take", "engine", commits),
    ):
        for stage in stages:
            name = f"{word} version {result.version}" if stage.bucket < 0 else f"{word} {stage.bucket}"
            details = {} if stage.bucket < 0 else _details(stage, buckets)
            yield Slice(f"{role} {stage.member}", name, stage.start_ns, stage.end_ns, details)


def _details(stage: Stage, buckets: Sequence[Bucket]) -> dict[str, str | int]:
    return {"bucket": stage.bucket, "buffer": f"I{stage.buffer}", "bytes": buckets[stage.bucket].nbytes}


def _planned(schedule: Schedule, spans: Sequence[Span], begun_ns: int) -> Iterator[Slice]:
    for operation, span in zip(schedule.operations, spans, strict=True):
        word, track = ("reload", "engines") if operation.kind is Kind.RELOAD else ("write", "sources")
        start_ns, end_ns = (begun_ns + round(at * 1e9) for at in (span.start_seconds, span.end_seconds))
        details = {"bucket": operation.bucket, "buffer": f"I{operation.buffer}"}
        yield Slice(track, f"{word} {operation.bucket}", start_ns, end_ns, details)
