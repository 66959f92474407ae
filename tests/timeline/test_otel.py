"""A job as spans: complete, nested, with the report's times, and the same ids whenever it is sent."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from relight.core.account.report import JobReport
from relight.errors import UsageError
from relight.timeline.otel import export, make_spans, send, stages_of
from tests.timeline.jobs import WALL, hung, rolled_back, taken_over

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


def spans_of(report: JobReport) -> list[Any]:
    exporter = memory.InMemorySpanExporter()
    assert "spans to here" in export(report, exporter, "here")
    return list(exporter.get_finished_spans())


def test_a_job_its_recoveries_and_their_stages() -> None:
    report, _ = hung()
    spans = spans_of(report)
    assert [span.name for span in spans] == ["job hung", "recovery 1", "detect", "stop", "replace", "restore", "redo"]
    job, recovery, *stages = spans
    assert job.parent is None
    assert recovery.parent.span_id == job.context.span_id
    assert {stage.parent.span_id for stage in stages} == {recovery.context.span_id}
    assert len({span.context.trace_id for span in spans}) == 1
    assert job.start_time == WALL * 10**9
    assert (job.end_time - job.start_time) / 1e9 == pytest.approx(report.wall_seconds)
    assert (stages[0].start_time - job.start_time) / 1e9 == pytest.approx(0.75)  # the hang began here
    assert (stages[0].end_time - stages[0].start_time) / 1e9 == pytest.approx(30.0)
    assert recovery.start_time == stages[0].start_time
    assert recovery.end_time == stages[-1].end_time
    assert job.resource.attributes["service.name"] == "relight"
    assert recovery.attributes["relight.stage.replace_seconds"] == 8.0
    assert recovery.attributes["relight.replaced"] == (0,)
    (failure,) = job.events
    assert (failure.name, failure.attributes["relight.kind"]) == ("failure", "hang")


@pytest.mark.parametrize("made", [rolled_back, taken_over, hung])
def test_stages_follow_each_other_and_fill_the_recovery(made: Any) -> None:
    report, _ = made()
    (recovery,) = report.recoveries
    parts = stages_of(report, recovery)
    assert all(end > begin for _, begin, end in parts)
    assert all(left[2] == right[1] for left, right in pairwise(parts))
    training_again = next(begin for name, begin, _ in parts if name in ("redo", "next step"))
    assert training_again - parts[0][1] == pytest.approx(recovery.stages.total_seconds)


def test_sent_twice_it_is_the_same_trace() -> None:
    report, _ = rolled_back()
    ids = [[(span.context.trace_id, span.context.span_id) for span in make_spans(report)] for _ in range(2)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == len(ids[0])
    other = make_spans(msgspec.structs.replace(report, job="another"))
    assert other[0].context.trace_id != ids[0][0][0]  # type: ignore[union-attr,unused-ignore]


def test_a_job_that_failed_says_so() -> None:
    report, _ = rolled_back()
    job = spans_of(msgspec.structs.replace(report, error="every replica is lost"))[0]
    assert (job.status.status_code.name, job.status.description) == ("ERROR", "every replica is lost")


def test_a_collector_gets_them() -> None:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        assert "Sent 7 spans" in send(hung()[0], f"http://127.0.0.1:{server.server_port}/")
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()
    ((path, body),) = bodies
    assert path == "/v1/traces"
    request = service.ExportTraceServiceRequest()
    request.ParseFromString(body)
    assert len(request.resource_spans[0].scope_spans[0].spans) == 7


def test_a_collector_that_refuses_them_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(400)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with pytest.raises(UsageError, match="the spans were not accepted"):
            send(hung()[0], f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()
    assert caplog.records == []


def test_an_address_that_is_none() -> None:
    with pytest.raises(UsageError, match="expected an address"):
        send(hung()[0], "localhost:4318")
