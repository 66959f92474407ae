"""A real job, watched: what the page says is what the job's own report says in the end."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relight.core.account.report import JobReport, decode_report
from relight.watch.events import (
    ControllerRestarted,
    Event,
    Failure,
    JobEnded,
    JobStarted,
    RecoveryFinished,
    TrainingResumed,
    TrainingStarted,
)
from relight.watch.feed import write_events
from tests.cli.command import Command
from tests.dashboard.conftest import Serve
from tests.dashboard.served import Served
from tests.dashboard.test_metrics import samples

PROGRAM = Path(__file__).parents[1] / "programs" / "train.py"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Command]:
    """A job of two ranks that loses one in step 3, and waits after step 8 until HOLD is there."""
    arguments = ("--steps", "14", "--hold-at", "8", "--hold", str(tmp_path / "HOLD"))
    command = Command(
        *("run", "--nproc-per-node", "2", "--standby", "1", "--run-dir", str(tmp_path / "run")),
        *("--chaos", "kill rank 1 in BACKWARD of step 3", str(PROGRAM), *arguments),
        cwd=tmp_path,
    )
    try:
        yield command
    finally:
        command.close()


def _replace_controller(job: Command) -> None:
    (controller,) = job.children("relight.server")
    os.kill(controller, signal.SIGKILL)
    job.wait_for(lambda: job.children("relight.server") not in ([], [controller]), "another controller is there")


def _stack(served: Served, rank: int) -> dict[str, Any]:
    status, _, body = served.get(f"/api/stack?rank={rank}")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    assert found["problem"] == ""
    return found


def test_the_page_says_what_the_report_says(job: Command, tmp_path: Path, serve: Serve) -> None:
    job.wait_for((tmp_path / "run" / "journal.jsonl").exists, "the job has a journal")
    served = serve(tmp_path / "run")
    seen: dict[str, Any] = {}
    lines: dict[int, dict[str, Any]] = {}
    killed = False
    with served.events() as events:
        for _, event in events:
            seen.update(event)
            lines.update({line["rank"]: line for line in event["ranks"]})
            summary = seen["summary"]
            if not killed and summary.get("version", 0) >= 8 and summary["recoveries"] == 1:
                assert summary["stage"] == "training"
                assert lines[0]["rss_bytes"] > 2**20  # of a process on this host
                assert "train.py" in _stack(served, 0)["text"]  # it waits for HOLD
                _replace_controller(job)
                killed = True
                (tmp_path / "HOLD").touch()
            if summary.get("ended"):
                break
    assert job.finish().status == 0
    report = decode_report((tmp_path / "run" / "report.json").read_bytes())
    assert [(f["number"], f["rank"], f["kind"], f["step"], f["evidence"]) for f in seen["failures"]] == [
        (f.number, f.rank, f.kind, f.step, f.evidence) for f in report.failures
    ]
    assert len(report.failures) == 1
    stages = [
        {name.removesuffix("_seconds"): value for name, value in msgspec.structs.asdict(r.stages).items()}
        for r in report.recoveries
    ]
    assert [r["stages"] for r in seen["recoveries"]] == stages
    summary = seen["summary"]
    assert summary["controller_restarts"] == report.controller_restarts == 1
    assert (summary["version"], summary["steps_repeated"]) == (report.final_version, report.steps_repeated)
    assert summary["time_lost_seconds"] == pytest.approx(report.time_lost_seconds, abs=1e-4)
    assert {line["version"] for line in lines.values()} == {14}
    check_metrics(served.get("/metrics")[2].decode(), report)
    check_events(tmp_path / "run", report)


def check_metrics(text: str, report: JobReport) -> None:
    """Compare what Prometheus reads in the end with the report."""
    found = samples(text)
    assert found["relight_steps_total"] == report.final_version
    assert found["relight_controller_restarts_total"] == 1
    assert found['relight_failures_total{kind="killed"}'] == 1
    assert found["relight_recovery_seconds_count"] == 1
    assert found["relight_lost_seconds_total"] == pytest.approx(report.time_lost_seconds)
    assert found["relight_restored_bytes_total"] == report.moved_bytes
    assert (found["relight_job_ended"], found["relight_job_failed"]) == (1, 0)


def check_events(run_dir: Path, report: JobReport) -> None:
    """Compare the events for programs with the report, with the death of the controller in between."""
    lines: list[bytes] = []
    write_events(run_dir, lines.append, follow=False)
    events = [msgspec.json.decode(line, type=Event) for line in lines]
    kinds = [type(event) for event in events]
    assert (kinds[0], kinds[-1]) == (JobStarted, JobEnded)
    for kind in (ControllerRestarted, Failure, RecoveryFinished, TrainingStarted, TrainingResumed):
        assert kinds.count(kind) == 1, kind
    last = events[-1]
    assert isinstance(last, JobEnded)
    assert (last.error, last.steps, last.failures) == ("", report.steps, 1)
    assert (last.state_digest, last.time_lost_seconds) == (report.final_state_digest, report.time_lost_seconds)
