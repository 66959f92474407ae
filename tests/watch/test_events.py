"""Events for programs: complete, in order, each as the schema says."""

import datetime
import json
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from relight.core.account.report import JobReport
from relight.core.protocol.events import ShutdownRequested
from relight.server.records.trace import StatusFile
from relight.sim.model.schedule import random_schedule
from relight.sim.timed.job import SimulatedJob
from relight.watch.events import Event, schema
from relight.watch.feed import write_events
from relight.wire.settings import JobSettings
from relight.wire.status import EngineVersion, PublishStatus
from tests.dashboard.made_up import MadeUpJob
from tests.recorded import write_journal

DOCS = Path(__file__).parents[2] / "docs"
KINDS = {kind.__struct_config__.tag: kind for kind in get_args(Event)}


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    lines: list[bytes] = []
    assert write_events(run_dir, lines.append, follow=False)
    return [json.loads(line) for line in lines]


def judge(events: list[dict[str, Any]]) -> None:
    """Each is of a known kind, and says no more and no less than that kind."""
    for event in events:
        kind = KINDS[event["event"]]
        assert set(event) == {"event", *kind.__struct_fields__}
        msgspec.convert(event, kind, strict=True)
        assert event["format"] == 1
    times = [event["seconds"] for event in events]
    assert times == sorted(times)


def made_up(tmp_path: Path) -> MadeUpJob:
    made = MadeUpJob(tmp_path / "run", ranks=3, wall=time.time() - 60, until=50, step_seconds=0.5)
    made.steps(4)
    made.fail(1)
    made.steps(3)
    made.note(made.at, "refused a connection from 10.0.0.9")
    made.tell(made.at, ShutdownRequested(reason="SIGTERM"))
    return made


def test_a_job_with_a_failure(tmp_path: Path) -> None:
    made = made_up(tmp_path)
    events = events_of(tmp_path / "run")
    judge(events)
    told = [event["event"] for event in events if event["event"] not in ("notice", "process_started", "standby_ready")]
    assert told == [
        *("job_started", "host_joined", "training_started", "process_ended", "failure", "recovery_started"),
        *("recovery_decided", "training_resumed", "recovery_finished", "job_ended"),
    ]
    by_kind = {event["event"]: event for event in events}
    report = made.core.report()
    assert by_kind["failure"]["rank"] == 1
    assert by_kind["failure"]["generation"] == 1
    assert by_kind["failure"]["evidence"] == "was killed by SIGKILL"
    assert by_kind["recovery_decided"]["targets"] == [1]
    assert by_kind["recovery_finished"]["stages"] == msgspec.to_builtins(report.recoveries[0].stages)
    assert by_kind["job_ended"]["error"] == "stopped: SIGTERM"
    assert by_kind["job_ended"]["time_lost_seconds"] == report.time_lost_seconds
    assert "refused a connection from 10.0.0.9" in [e["text"] for e in events if e["event"] == "notice"]


def record(run_dir: Path, seed: int) -> JobReport:
    """The journal of a simulated job; returns its report."""
    job = SimulatedJob(random_schedule(seed))
    job.run()
    run_dir.mkdir()
    given = {name: value for name, value in msgspec.structs.asdict(job.settings).items() if name != "staying_host"}
    settings = JobSettings(job="simulated", script="none", **given)  # that one follows from the others
    write_journal(run_dir, settings, job.journal)
    return job.controller.report()


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_nothing_is_missing_and_nothing_is_told_twice(tmp_path: Path, seed: int) -> None:
    report = record(tmp_path / "run", seed)
    events = events_of(tmp_path / "run")
    judge(events)
    kinds = [event["event"] for event in events]
    assert kinds[0] == "job_started"
    assert kinds.count("job_started") == kinds.count("training_started") == 1
    failures = {event["number"]: event for event in events if event["event"] == "failure"}
    assert list(failures) == list(range(1, len(report.failures) + 1))
    for event in events:
        if event["event"] == "failure_explained":
            failures[event["number"]] |= {"kind": event["kind"], "evidence": event["evidence"]}
    assert [(f["rank"], f["kind"], f["evidence"]) for f in failures.values()] == [
        (f.rank, f.kind, f.evidence) for f in report.failures
    ]
    finished = [event for event in events if event["event"] == "recovery_finished"]
    if "job_ended" in kinds:
        assert kinds.count("job_ended") == 1
        assert [event["number"] for event in finished] == [recovery.number for recovery in report.recoveries]
        assert [event["stages"] for event in finished] == [msgspec.to_builtins(r.stages) for r in report.recoveries]
    generations = [event["generation"] for event in events if event["event"] == "training_resumed"]
    assert generations == sorted(set(generations))


def test_published_weights_are_told_in_their_turn(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path / "run", ranks=2, wall=time.time() - 60, until=50)
    file = StatusFile(tmp_path / "run", lambda text: None)

    def tell(now: float, **given: Any) -> None:
        engines = (EngineVersion(name="e1", pid=1, version=given.pop("has", -1)),)
        file.append(now, PublishStatus(process="w0", engines=engines, **given))

    tell(2.0)  # nothing so far
    tell(3.0, version=5, total_bytes=100, moved_bytes=10)  # under way
    tell(4.0, version=5, updates=1, has=5, update_seconds=0.25)
    tell(4.5, version=5, updates=1, has=5, update_seconds=0.25)  # said again
    made.note(5.0, "between the two")
    tell(6.0, version=10, updates=1, has=5, error="no engine answers", dropped={"e1": "it was silent"})
    made.tell(7.0, ShutdownRequested(reason="SIGTERM"))
    events = events_of(tmp_path / "run")
    judge(events)
    told = [event for event in events if event["event"] in ("weights_published", "notice", "job_ended")][-4:]
    assert [event["event"] for event in told] == ["weights_published", "notice", "weights_published", "job_ended"]
    assert [event["seconds"] for event in told] == [4.0, 5.0, 6.0, 7.0]
    at = [datetime.datetime.fromisoformat(event["time"]).timestamp() - made.wall for event in told]
    assert at == pytest.approx([4.0, 5.0, 6.0, 7.0], abs=1e-3)
    assert (told[0]["version"], told[0]["engines"], told[0]["update_seconds"]) == (5, {"e1": 5}, 0.25)
    assert (told[2]["error"], told[2]["dropped"]) == ("no engine answers", {"e1": "it was silent"})


def test_the_schema_in_the_docs_is_the_one_that_is_kept() -> None:
    assert (DOCS / "events.schema.json").read_bytes() == schema(), (
        "make it anew: relight events --schema > docs/events.schema.json"
    )
    text = (DOCS / "WATCHING.md").read_text()
    assert [name for name in KINDS if f"`{name}`" not in text] == []


def test_every_event_is_as_the_schema_says(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads((DOCS / "events.schema.json").read_text()))
    made_up(tmp_path)
    for event in events_of(tmp_path / "run"):
        validator.validate(event)
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**event, "seconds": "soon"})


def test_half_a_line_is_told_once_it_is_whole(tmp_path: Path) -> None:
    made_up(tmp_path)
    path = tmp_path / "run" / "journal.jsonl"
    whole = path.read_bytes()
    all_of_them = events_of(tmp_path / "run")
    path.write_bytes(whole[:-20])
    assert events_of(tmp_path / "run") == all_of_them[: len(events_of(tmp_path / "run"))]
    assert len(events_of(tmp_path / "run")) < len(all_of_them)
