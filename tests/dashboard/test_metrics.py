"""`/metrics`: what Prometheus reads, what the Grafana page asks for, and that no counter ever goes back."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from relight.dashboard.model.exposition import Exposition
from relight.dashboard.model.job import Job
from relight.dashboard.model.metrics import exposition
from relight.dashboard.server import Dashboard
from relight.dashboard.web.http import BadRequest, Request
from relight.server.records.trace import StatusFile
from relight.sim.model.schedule import random_schedule
from relight.sim.timed.job import SimulatedJob
from relight.wire.settings import JobSettings
from relight.wire.status import EngineVersion, PublishStatus, RestoreStatus
from tests.dashboard.conftest import Serve
from tests.dashboard.made_up import MadeUpJob
from tests.dashboard.test_job import read
from tests.recorded import write_journal

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana" / "relight.json"
UNITS = ("seconds", "bytes", "total", "info")
UNITLESS = {  # counts and states
    *("relight_job_ended", "relight_job_failed", "relight_stage", "relight_generation", "relight_steps_wanted"),
    *("relight_ranks", "relight_ranks_intact", "relight_standbys", "relight_standbys_wanted", "relight_engine_version"),
}
SAMPLE = re.compile(r"([a-z0-9_]+)(\{.*\})? ([^ ]+)")


def samples(text: str) -> dict[str, float]:
    """By name and labels."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            name = match[1] + (match[2] or "")
            assert name not in found, name
            found[name] = float(match[3])
    return found


def kinds(text: str) -> dict[str, str]:
    """The type of each metric."""
    return {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}


def counters(text: str) -> dict[str, float]:
    """Everything in it that must never go down."""
    of = kinds(text)
    base = {name: re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name) for name in samples(text)}
    return {
        name: value
        for name, value in samples(text).items()
        if of.get(name.partition("{")[0]) == "counter" or of.get(base[name]) == "histogram"
    }


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Metrics of a job that lost a rank and publishes weights."""
    made = MadeUpJob(tmp_path / "run", ranks=3, wall=time.time() - 30, until=50, step_seconds=0.5, job='a "b"\\\n')
    made.steps(4)
    made.fail(1)
    made.steps(3)
    status = StatusFile(tmp_path / "run", lambda text: None)
    engines = (EngineVersion(name="engine-1", pid=7, version=5), EngineVersion(name="engine-2", pid=8, version=-1))
    status.append(9.0, PublishStatus(process="w0", engines=engines, updates=3, updates_bytes=3000, updates_seconds=0.5))
    job = read(tmp_path / "run")
    return exposition(job, job.now_ns(time.time_ns()), 1.5, {"w0": 2**20, "w1": 3})


def test_the_numbers_are_those_of_the_job(text: str) -> None:
    found = samples(text)
    assert found["relight_steps_total"] == 8
    assert found["relight_steps_wanted"] == 50
    assert found['relight_failures_total{kind="killed"}'] == 1
    assert found['relight_recoveries_total{decision="back",replacement="standby"}'] == 1
    assert found["relight_recovery_seconds_count"] == 1
    assert found["relight_recovery_seconds_sum"] == pytest.approx(0.302, abs=0.01)
    assert found['relight_recovery_seconds_bucket{le="0.25"}'] == 0
    assert found['relight_recovery_seconds_bucket{le="0.5"}'] == 1
    assert found['relight_recovery_seconds_bucket{le="+Inf"}'] == 1
    assert found['relight_recovery_stage_seconds_total{stage="copy"}'] == pytest.approx(0.1)
    assert found["relight_restored_bytes_total"] == 3 * 2**20
    assert found["relight_steps_repeated_total"] == 1
    assert found['relight_stage{stage="training"}'] == 1
    assert found['relight_standbys{state="ready"}'] == 1
    assert found["relight_ranks_intact"] == 3
    assert found["relight_controller_silence_seconds"] == 1.5
    assert found['relight_rank_resident_memory_bytes{rank="0"}'] == 2**20
    assert found['relight_rank_step_seconds{rank="2"}'] > 0
    assert found['relight_engine_version{engine="engine-1"}'] == 5
    assert found["relight_published_updates_total"] == 3
    assert found["relight_publish_seconds_total"] == 0.5


def test_names_have_units_and_no_label_grows_for_ever(text: str) -> None:
    for name, kind in kinds(text).items():
        assert name in UNITLESS or name.endswith(UNITS), name
        assert (kind == "counter") == name.endswith("_total"), name
    labels = set(re.findall(r'[{,]([a-z_]+)="', text))
    assert labels <= {"run", "script", "stage", "state", "kind", "decision", "replacement", "le", "rank", "engine"}


def test_prometheus_reads_it(text: str) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["relight_job_info"].samples[0].labels == {"run": 'a "b"\\\n', "script": "train.py"}
    assert families["relight_failures"].type == "counter"
    assert families["relight_recovery_seconds"].type == "histogram"
    assert sum(len(family.samples) for family in families.values()) == len(samples(text))


def promtool(*arguments: str, given: str = "") -> str:
    """Complaints of Prometheus' own tool."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    found = subprocess.run([tool, *arguments], input=given, text=True, capture_output=True, check=False, timeout=60)
    return "" if found.returncode == 0 else found.stdout + found.stderr or "it failed"


def test_promtool_finds_nothing_wrong(text: str) -> None:
    assert promtool("check", "metrics", given=text) == ""


@pytest.mark.parametrize("seed", range(12))
def test_no_counter_ever_goes_back(tmp_path: Path, seed: int) -> None:
    """Whatever fails, the controller included; and another dashboard says the same as one that was there all along."""
    simulated = SimulatedJob(random_schedule(seed))
    simulated.run()
    given = {
        name: value for name, value in msgspec.structs.asdict(simulated.settings).items() if name != "staying_host"
    }
    settings = JobSettings(job="j", script="s", **given)  # that one follows from the others
    write_journal(tmp_path, settings, simulated.journal)
    job, text = Job(), ""
    before: dict[str, float] = {}
    for line in (tmp_path / "journal.jsonl").read_bytes().splitlines():
        job.take_journal(line)
        text = exposition(job, 10**9, 0.0, {})
        now = counters(text)
        assert {name: value for name, value in before.items() if now.get(name, -1) < value} == {}
        before = now
    assert job.problem == ""
    assert counters(exposition(read(tmp_path), 10**9, 0.0, {})) == before
    report = simulated.controller.report()
    assert sum(value for name, value in before.items() if name.startswith("relight_failures_total")) == len(
        report.failures
    ) - sum(failure.kind == "ended" for failure in report.failures if job.ended is None)


def test_a_copy_that_is_under_way(tmp_path: Path) -> None:
    made = MadeUpJob(tmp_path, ranks=2, wall=time.time() - 30, until=50)
    made.steps(1)
    job = read(tmp_path)
    status = RestoreStatus(process="w3", rank=1, generation=2, copied_bytes=5, total_bytes=9, seconds=1.0)
    job.take_status(status)
    assert samples(exposition(job, 10**9, 0.0, {}))["relight_restoring_bytes"] == 0  # of no recovery that is known


def test_what_the_page_of_grafana_asks_for_is_there(text: str) -> None:
    page = json.loads(GRAFANA.read_text())
    asked = [target["expr"] for panel in page["panels"] for target in panel.get("targets", [])]
    asked += [annotation["expr"] for annotation in page["annotations"]["list"]]
    asked += [variable["query"]["query"] for variable in page["templating"]["list"] if variable["type"] == "query"]
    assert len(asked) > 20
    known = set(kinds(text))
    histograms = {name for name, kind in kinds(text).items() if kind == "histogram"}
    known = known - histograms | {f"{name}{end}" for name in histograms for end in ("_bucket", "_sum", "_count")}
    used = {name for expression in asked for name in re.findall(r"relight_[a-z_]+", expression)}
    assert used <= known, used - known
    for expression in asked:
        assert expression.count("(") == expression.count(")"), expression
        if "label_values" not in expression:
            assert 'instance="$instance"' in expression
    positions = [tuple(panel["gridPos"].values()) for panel in page["panels"]]
    assert len(set(positions)) == len(positions)


def test_promtool_understands_every_query(tmp_path: Path) -> None:
    page = json.loads(GRAFANA.read_text())
    asked = [target["expr"] for panel in page["panels"] for target in panel.get("targets", [])]
    rules = [
        {"record": f"q{number}", "expr": expression.replace("$__rate_interval", "1m").replace("$__range", "1h")}
        for number, expression in enumerate(asked)
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    assert promtool("check", "rules", str(tmp_path / "rules.yml")) == ""


def test_it_is_served_like_everything_about_the_job(tmp_path: Path, serve: Serve, made: MadeUpJob) -> None:
    served = serve(tmp_path / "run")
    served.wait_for_version(10)
    status, headers, body = served.get("/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert samples(body.decode())["relight_steps_total"] == 10
    assert served.get("/metrics", {"Host": "evil.example"})[0] == 403


def test_until_all_is_read_there_is_nothing(tmp_path: Path) -> None:
    """A counter that begins again at 0 would be taken for a new job's."""
    dashboard = Dashboard(tmp_path)
    with pytest.raises(BadRequest) as refused:
        dashboard._metrics(Request("GET", "/metrics", {}, {}))
    assert refused.value.status == 503


def test_a_metric_has_a_name_that_prometheus_takes() -> None:
    with pytest.raises(AssertionError):
        Exposition().gauge("relight-steps", "", 1)
    with pytest.raises(AssertionError):
        Exposition().counter("relight_steps", "", 1)
