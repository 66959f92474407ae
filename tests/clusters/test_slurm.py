"""A real Slurm of five nodes: lost nodes, drained nodes, the time limit, and the end by `scancel`."""

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.core.account.report import decode_report
from tests.clusters.quick_start import quick_start
from tests.clusters.slurm import ENDS, Slurm, why_not
from tests.clusters.slurm_job import SlurmJob
from tests.hosts.cluster import kill_at_once
from tests.survival.harness import PATIENCE, PROGRAMS, Bench, Outcome, Training
from tests.survival.judge import check_survived

REASON = why_not()
pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(1200),
]
STEPS = 305
RELIGHT = (sys.executable, "-m", "relight")
TRAINING = Training(ranks=3, steps=STEPS, arguments=("--pause", "0.2", "--tell", "--hold-at", str(STEPS - 5)))
PATIENT = ("--agent-timeout-seconds", "10")  # than Slurm is, when a host that hears no other one asks it
UNPAUSED = Training(ranks=3, steps=STEPS, arguments=("--tell",))  # the same bits; there is nothing to wait for


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with Slurm() as cluster:
        yield cluster


@pytest.fixture
def slurm(cluster: Slurm) -> Iterator[Slurm]:
    """The cluster, whose nodes are all idle, also after a test that failed."""
    yield cluster
    cluster.clear()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """This training on one host, undisturbed."""
    directories = iter([tmp_path_factory.mktemp("reference")])
    return Bench(lambda: next(directories)).reference(UNPAUSED)


def joined(job: SlurmJob, agent: str) -> bool:
    """Return whether the controller has taken a host in. What it says is lost with srun, on the first node."""
    return any('"AgentJoined"' in line and f'"{agent}"' in line for line in job.journal().splitlines())


def test_the_quick_start(slurm: Slurm, tmp_path: Path) -> None:
    """Typed as it stands in the documentation, but for a script that is there, and GPUs, which are not."""
    typed = quick_start(
        "Slurm",
        "sh",
        {
            "relight submit": f"{' '.join(RELIGHT)} submit",
            "--option=--gpus-per-node=8": f"--option=--output={tmp_path}/out",
            "--nproc-per-node 8": "--nproc-per-node 1 --oversubscribe",
            "train.py --lr 0.1": f"{PROGRAMS}/train.py --steps 20",
        },
    )
    said = slurm.ask("sh", "-ec", typed, directory=tmp_path, HOME=str(tmp_path))
    number = said.split()[-1]  # of "Submitted batch job 17"
    slurm.wait_until(lambda: slurm.job_state(number) in ENDS, "the job ends")
    output = (tmp_path / "out").read_text()
    assert slurm.job_state(number) == "COMPLETED", output
    report = decode_report((tmp_path / "runs" / number / "report.json").read_bytes())
    assert (report.final_version, report.error) == (20, ""), output


def test_scancel_leaves_nothing_and_no_order(slurm: Slurm, tmp_path: Path) -> None:
    job = SlurmJob(slurm, tmp_path, TRAINING)
    job.until_it_trains()
    slurm.ask("scontrol", "update", "nodename=n5", "state=drain", "reason=so that an order waits")
    slurm.kill_relight("n4")
    job.wait_until(lambda: "ordered-1 PENDING" in slurm.queue(), "a host is on order")
    said = re.compile(r"ordered-1 has not come yet: Slurm's job \d+ is PENDING \((Resources|ReqNodeNotAvail)")
    job.wait_until(lambda: said.search(job.output()) is not None, "it is said in Slurm's words")
    slurm.ask("scancel", job.number)
    job.check_nothing_is_left()
    slurm.ask("scontrol", "update", "nodename=n5", "state=resume")


def test_an_order_that_slurm_refuses_is_placed_again(slurm: Slurm, tmp_path: Path, reference: Outcome) -> None:
    job = SlurmJob(slurm, tmp_path, TRAINING)
    job.until_it_trains()
    slurm.ask("scontrol", "update", "partitionname=all", "state=inactive")
    slurm.kill_relight("n4")
    words = "Required partition not available (inactive or drain); another one is placed in 10 s"
    job.wait_until(lambda: words in job.output(), "it is said in Slurm's words")
    slurm.ask("scontrol", "update", "partitionname=all", "state=up")
    seconds = job.wait_until(lambda: "ordered-2 joined" in job.output(), "another order is placed")
    print(f"refused order: another host joined {seconds:.1f} s after Slurm has a place for it")
    job.release()
    outcome = job.wait()
    check_survived(outcome, reference)
    job.check_nothing_is_left()
    assert not outcome.report.failures, outcome.describe()  # the spare held no rank


@pytest.mark.parametrize("way", ["state=drain", "state=fail", "relight drain", "SIGTERM"])
def test_a_node_is_drained_and_no_step_is_repeated(slurm: Slurm, tmp_path: Path, reference: Outcome, way: str) -> None:
    """By an administrator in two ways, by hand, or by a signal to `relight run` on that node."""
    job = SlurmJob(slurm, tmp_path, TRAINING)
    job.until_it_trains()
    begun = time.monotonic()
    if way.startswith("state="):
        slurm.ask("scontrol", "update", "nodename=n2", way, "reason=a new disk")
    elif way == "relight drain":
        slurm.ask(*RELIGHT, "drain", str(job.run_dir), "node-1", "--token-file", str(tmp_path / "token"))
    else:
        (launcher,) = slurm.launchers("n2")
        launcher.terminate()
    job.wait_until(lambda: "node-1 is given back" in job.output(), "the node is given back")
    print(f"drained by {way}: given back after {time.monotonic() - begun:.1f} s, load {os.getloadavg()[0]:.1f}")
    job.wait_until(lambda: "ordered-1 joined" in job.output(), "another spare is there")
    print(f"drained by {way}: another spare joined after {time.monotonic() - begun:.1f} s")
    job.release()
    outcome = job.wait()
    check_survived(outcome, reference)
    job.check_nothing_is_left()
    if way.startswith("state="):
        slurm.ask("scontrol", "update", "nodename=n2", "state=resume")
    assert {(f.rank, f.kind) for f in outcome.report.failures} == {(1, "drained")}, outcome.describe()
    (recovery,) = outcome.report.recoveries
    assert (recovery.steps_repeated, recovery.steps_undone) == (0, 0), outcome.describe()


def test_at_the_time_limit_the_job_is_queued_again(slurm: Slurm, tmp_path: Path, reference: Outcome) -> None:
    arguments = ("--pause", "0.8", "--tell", "--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "50")
    training = Training(ranks=3, steps=STEPS, arguments=arguments)
    job = SlurmJob(slurm, tmp_path, training, "--time", "3", "--warning-seconds", "60")
    job.until_it_trains()
    told = "Start the same command again"  # a minute before the limit, and by Slurm's clock up to a minute earlier
    job.wait_until(lambda: told in job.output(), "the last checkpoint is written", 180.0)
    job.release()
    seconds = job.wait_until(lambda: "training goes on from the checkpoint" in job.output(), "it trains again")
    print(f"time limit: training again after {seconds:.1f} s")
    outcome = job.wait()
    job.check_nothing_is_left()
    assert outcome.report.error == "", outcome.describe()
    assert outcome.report.began_at > 0, outcome.describe()
    assert outcome.report.final_state_digest == reference.report.final_state_digest, outcome.describe()
    assert outcome.finals == reference.finals, outcome.describe()


def test_a_lost_node_is_replaced_by_the_spare_and_the_spare_by_an_order(
    slurm: Slurm, tmp_path: Path, reference: Outcome
) -> None:
    job = SlurmJob(slurm, tmp_path, TRAINING)
    job.until_it_trains()
    slurm.lose("n3")
    seconds = job.wait_until(lambda: "recovered in" in job.output(), "it trains again")
    print(f"lost: training again after {seconds:.1f} s")
    seconds += job.wait_until(lambda: "ordered-1 joined" in job.output(), "another spare is there")
    print(f"lost: another spare joined after {seconds:.1f} s")
    job.release()
    outcome = job.wait()
    check_survived(outcome, reference)
    job.check_nothing_is_left("n3")
    slurm.bring_back("n3")
    assert [(f.rank, f.kind) for f in outcome.report.failures] == [(2, "host lost")], outcome.describe()
    assert outcome.report.recoveries[0].replacement_kind == "standby", outcome.describe()
    stages = outcome.report.recoveries[0].stages
    assert stages.detect_seconds is not None, outcome.describe()
    after = stages.total_seconds - stages.detect_seconds
    print(f"lost: noticed after {stages.detect_seconds:.2f} s, and all ranks train again {after:.2f} s after that")
    assert after < PATIENCE, outcome.describe()


@pytest.mark.parametrize("way", ["dead", "cut off"])
def test_the_controller_moves_when_the_first_node_is_lost(
    slurm: Slurm, tmp_path: Path, reference: Outcome, way: str
) -> None:
    """The batch script is lost with that node, so Slurm alone would keep the job until its time limit."""
    job = SlurmJob(slurm, tmp_path, TRAINING, flags=(*PATIENT, "--lease-seconds", "6"))
    job.until_it_trains()
    slurm.lose("n1", dies=way == "dead")
    seconds = job.wait_until(lambda: "recovered in" in job.journal(), "it trains again")
    print(f"first node {way}: training again after {seconds:.1f} s")
    seconds += job.wait_until(lambda: joined(job, "ordered-1"), "another spare is there")
    print(f"first node {way}: another spare joined after {seconds:.1f} s")
    job.release()
    seconds = job.wait_until(lambda: slurm.job_state(job.number) == "COMPLETED", "Slurm knows of the end")
    print(f"first node {way}: Slurm has the job as completed {seconds:.1f} s after it was told to go on")
    outcome = job.wait()
    check_survived(outcome, reference)
    job.check_nothing_is_left("n1")
    slurm.bring_back("n1")
    assert [(f.rank, f.kind) for f in outcome.report.failures] == [(0, "host lost")], outcome.describe()
    assert outcome.report.controller_restarts == 1, outcome.describe()


def test_a_job_whose_srun_is_killed_trains_on(slurm: Slurm, tmp_path: Path, reference: Outcome) -> None:
    job = SlurmJob(slurm, tmp_path, TRAINING)
    job.until_it_trains()
    kill_at_once(process for process in slurm.processes("n1") if process.name() == "srun")
    job.wait_until(lambda: "srun was killed: the nodes go on without it" in job.output(), "it is said")
    job.release()
    seconds = job.wait_until(lambda: slurm.job_state(job.number) == "COMPLETED", "Slurm knows of the end")
    print(f"srun killed: Slurm has the job as completed {seconds:.1f} s after it was told to go on")
    outcome = job.wait()
    check_survived(outcome, reference)
    job.check_nothing_is_left()
    assert not outcome.report.failures, outcome.describe()


def test_a_job_without_a_controller_is_queued_again(slurm: Slurm, tmp_path: Path, reference: Outcome) -> None:
    arguments = (*TRAINING.arguments, "--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "1")
    training = Training(ranks=3, steps=STEPS, arguments=arguments)
    job = SlurmJob(slurm, tmp_path, training, "--fixed-controller", flags=("--controller-timeout-seconds", "10"))
    job.until_it_trains()
    slurm.lose("n1", dies=True)
    seconds = job.wait_until(lambda: "training goes on from the checkpoint" in job.output(), "it is queued again")
    print(f"without a controller: queued again, and training after {seconds:.1f} s")
    job.release()
    outcome = job.wait()
    job.check_nothing_is_left("n1")
    slurm.bring_back("n1")
    assert outcome.status == 0, outcome.describe()
    assert outcome.report.began_at > 0, outcome.describe()
    assert outcome.report.final_state_digest == reference.report.final_state_digest, outcome.describe()
    assert outcome.finals == reference.finals, outcome.describe()
