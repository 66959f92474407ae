"""Jobs on several hosts that are given something wrong: it is named, and training goes on with the same bits."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.namespaces import missing
from relight.wire.template import SHARED_VARIABLE
from relight.wire.versions import installed_versions
from tests.hosts.cluster import Cluster
from tests.hosts.conftest import begin, finish
from tests.survival.harness import DEADLINE_SECONDS, Outcome

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
CLOCK = Path(__file__).with_name("clock.c")


def other_version(directory: Path, package: str) -> dict[str, str]:
    """Return the variables of a host on which this package has another version, as far as can be seen from outside."""
    about = directory / f"{package}-0.0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.1\n")
    return {"PYTHONPATH": str(directory)}


def test_hosts_that_do_not_belong_here_are_refused_when_they_join(
    cluster: Cluster, tmp_path: Path, reference: Outcome
) -> None:
    """With another relight, another torch, or another job's token. Both sides say so, and the others train on."""
    begin(cluster)
    right, wrong = tmp_path / "token", tmp_path / "other-token"
    wrong.write_text("the secret of another job")
    wrong.chmod(0o600)
    here = installed_versions()
    cases = [
        (
            right,
            other_version(tmp_path / "a", "relight"),
            f"relight 0.0.1, and the job's first host has relight {here['relight']}",
        ),
        (
            right,
            other_version(tmp_path / "b", "torch"),
            f"torch 0.0.1, and the job's first host has torch {here['torch']}",
        ),
        (wrong, {}, "does not know this job's token"),
    ]
    for number, (token, variables, words) in enumerate(cases):
        label = f"-{number}"
        join = ("agent", "--controller", cluster.endpoint, "--name", f"other{label}", "--token-file", str(token))
        cluster.run_on(2, *join, label=label, variables=variables)
        assert cluster.launchers.pop(f"h2{label}").wait(DEADLINE_SECONDS) == 1
        assert words in (tmp_path / f"h2{label}.err").read_text(), cluster.describe()
        cluster.wait_until(lambda words=words: words in cluster.messages(), "the first host says it")  # type: ignore[misc]
    cluster.wait_for_steps(3)
    outcome = finish(cluster, reference)
    assert not outcome.report.failures, outcome.describe()


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes the clock of a host wrong."""
    if shutil.which("cc") is None:
        pytest.skip("not installed: a C compiler (cc)")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", str(library), str(CLOCK), "-ldl"], check=True)
    return library


@pytest.mark.parametrize("hours", [1, -1], ids=["ahead", "behind"])
def test_clocks_that_are_hours_apart_decide_nothing(
    cluster: Cluster, clock: Path, reference: Outcome, hours: int
) -> None:
    """The first host is lost with the controller. The other, whose clock is wrong, takes over by the Lease."""
    wrong = {"LD_PRELOAD": str(clock), "SHIFT_SECONDS": str(3600 * hours), SHARED_VARIABLE: ""}
    begin(cluster, "--lease", "file", "--lease-seconds", "6", variables={1: wrong})
    cluster.lose(0)
    cluster.chief = "h1"
    cluster.wait_until(lambda: "recovered in" in cluster.journal(), "the job trains on")
    outcome = finish(cluster, reference)
    assert outcome.report.controller_restarts == 1
    assert [failure.rank for failure in outcome.report.failures] == [0, 1], outcome.describe()
    assert len(outcome.report.recoveries) == 1, outcome.describe()


def test_slurm_is_asked_for_no_host_where_there_is_no_slurm(tmp_path: Path) -> None:
    """It is said before anything is started."""
    (tmp_path / "token").write_text("a secret of this test's hosts")
    (tmp_path / "token").chmod(0o600)
    where = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "n1:29400", "--token-file", f"{tmp_path}/token")
    command = ("-m", "relight", "run", *where, "--supplier", "slurm", "train.py")
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--supplier slurm: there is no sbatch on the PATH of this host" in done.stderr


@pytest.mark.parametrize(
    ("supplier", "words"),
    [
        ("echo no quota is left >&2; exit 1", "no quota is left; another one is placed"),
        ("seq 1 100000; echo $PATH", "instead of one line with an identifier; another one is placed"),
        pytest.param("kill -9 $$", "it ended with status -9; another one is placed", marks=pytest.mark.all),
        pytest.param("/no/such/command", "not found; another one is placed", marks=pytest.mark.all),
    ],
    ids=["refuses", "garbage", "is killed", "is not there"],
)
def test_a_supplier_that_fails_stops_nothing(cluster: Cluster, reference: Outcome, supplier: str, words: str) -> None:
    """It may be known that no host comes, or not. Other ways to fail: tests/server/test_supplier.py."""
    begin(cluster, "--supplier", supplier)
    cluster.lose(1)
    cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on")
    cluster.wait_until(lambda: words in cluster.messages(), "it is said why no host comes")
    outcome = finish(cluster, reference)
    told = words.partition(";")[0]
    assert any(told in text for text in outcome.report.notices), outcome.describe()


def test_a_supplier_that_hangs_holds_nothing_up(cluster: Cluster, reference: Outcome) -> None:
    """Neither training nor the end of the job. What may have been ordered is named then, for people."""
    begin(cluster, "--supplier", "sleep 1000")
    cluster.lose(1)
    cluster.wait_until(lambda: "recovered in" in cluster.messages(), "the job trains on")
    outcome = finish(cluster, reference)
    words = "it is not known whether the order ordered-1 for a host is cancelled; see to it by hand"
    assert words in cluster.messages(), outcome.describe()
    sleeping = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "1000"]]
    assert not sleeping


def test_a_machine_that_was_lost_twice_and_is_given_again(cluster: Cluster, reference: Outcome) -> None:
    """It is named in the order as one to exclude. It may help out, and another host is ordered beside it."""
    order = f"RELIGHT_MACHINE=rack-7 {cluster.ordering(1)}"
    begin(cluster, "--supplier", order, variables={n: {"RELIGHT_MACHINE": f"rack-{7 * n}"} for n in (0, 1)})
    for number in (1, 2):
        cluster.lose(1)
        cluster.wait_until(lambda n=number: f'"ordered-{n}"' in cluster.journal(), "it is lost")  # type: ignore[misc]
        cluster.heal(1)
        cluster.wait_until(lambda n=number: f"ordered-{n} joined" in cluster.messages(), "it is given")  # type: ignore[misc]
    words = "no host of use came of ordered-2: rack-7 came, which was lost twice in this job; another one is placed in"
    cluster.wait_until(lambda: words in cluster.messages(), "it is said")
    outcome = finish(cluster, reference)
    assert any("rack-7 came, which was lost twice" in text for text in outcome.report.notices), outcome.describe()
