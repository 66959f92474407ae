"""An emulated Kubernetes: pods are deleted and evicted, nodes are lost, a controller is stopped and wakes up.

Figures that are printed are those of the emulation.
"""

import contextlib
import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from benchmarks.namespaces import missing
from relight.launch.submit.jobset import FAULT_STATUS
from relight.server.records.journal import read_journal
from tests.device.driver import Driver, why_not
from tests.survival.harness import DEADLINE_SECONDS, Bench, Outcome, Training
from tests.survival.judge import check_survived

REASON = missing() or ("not installed: kmock" if importlib.util.find_spec("kmock") is None else "")
pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(600),
]
if not REASON:
    from tests.clusters.api_server import NAMESPACE, path_of
    from tests.clusters.kubernetes import LEASE_SECONDS, Kubernetes

STEPS = 205
TRAINING = Training(ranks=2, steps=STEPS, arguments=("--pause", "0.2", "--tell", "--hold-at", str(STEPS - 5)))
UNPAUSED = Training(ranks=2, steps=STEPS, arguments=("--tell",))  # the same bits; there is nothing to wait for


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """This training on one host, undisturbed."""
    directories = iter([tmp_path_factory.mktemp("reference")])
    return Bench(lambda: next(directories)).reference(UNPAUSED)


@contextlib.contextmanager
def training_pods(directory: Path, variables: Mapping[int, Mapping[str, str]] = {}) -> "Iterator[Kubernetes]":
    """Two pods with a rank each and a spare, which train, and a node that is idle. `variables`: of single nodes."""
    with Kubernetes(directory, TRAINING, nodes=2, spares=1, idle=1) as kubernetes:
        kubernetes.start("--preload", "torch", variables=variables)
        kubernetes.wait_until(lambda: "committed 3" in kubernetes.output(), "training has begun")
        kubernetes.wait_until(lambda: '"StandbyReady"' in kubernetes.journal(), "the standby is warm")
        yield kubernetes


@pytest.fixture
def cluster(tmp_path: Path) -> "Iterator[Kubernetes]":
    with training_pods(tmp_path) as kubernetes:
        yield kubernetes


@contextlib.contextmanager
def training_beside_a_device(directory: Path) -> "Iterator[tuple[Kubernetes, Driver, int]]":
    """Train on these pods; yields them, the driver of a device on h1, and the number of the pod there."""
    driver = Driver(directory / "driver", devices=1)
    with training_pods(directory, {1: {**driver.variables, "CUDA_VISIBLE_DEVICES": "0"}}) as kubernetes:
        (number,) = [job.number for job in kubernetes.jobs if kubernetes.node_of(job.number) == "h1"]
        yield kubernetes, driver, number


def joined(cluster: "Kubernetes") -> int:
    return cluster.journal().count('"AgentJoined"')


def timed(cluster: "Kubernetes", what: str, condition: Callable[[], bool], begun: float) -> None:
    cluster.wait_until(condition, what)
    print(f"{what}: after {time.monotonic() - begun:.1f} s, load {os.getloadavg()[0]:.1f} (emulated)")


def finish(cluster: "Kubernetes", reference: Outcome) -> Outcome:
    cluster.release()
    outcome = cluster.wait()
    check_survived(outcome, reference)
    cluster.check_nothing_is_left()
    return outcome


def check_in_order(outcome: Outcome, rank: int) -> None:
    assert [(f.rank, f.kind) for f in outcome.report.failures] == [(rank, "drained")], outcome.describe()
    (recovery,) = outcome.report.recoveries
    assert (recovery.steps_repeated, recovery.steps_undone) == (0, 0), outcome.describe()


def test_a_pod_that_is_deleted_is_left_in_order_and_made_again(cluster: "Kubernetes", reference: Outcome) -> None:
    begun, before = time.monotonic(), joined(cluster)
    cluster.delete_pod(1)
    timed(cluster, "deleted: the pod has ended", lambda: cluster.jobs[1].ends == [143], begun)
    timed(cluster, "deleted: a new pod has joined", lambda: joined(cluster) > before, begun)
    check_in_order(finish(cluster, reference), 1)
    assert [job.made for job in cluster.jobs] == [1, 2, 1]


def test_an_evicted_head_hands_the_controller_over_and_no_step_is_repeated(
    cluster: "Kubernetes", reference: Outcome
) -> None:
    begun, before = time.monotonic(), joined(cluster)
    first = cluster.lease()["holderIdentity"]
    cluster.evict_pod(0)
    timed(cluster, "evicted head: the pod has ended", lambda: cluster.jobs[0].ends == [143], begun)
    timed(
        cluster,
        "evicted head: another holds the Lease",
        lambda: cluster.lease()["holderIdentity"] not in ("", first),
        begun,
    )
    timed(cluster, "evicted head: a new pod has joined", lambda: joined(cluster) > before, begun)
    outcome = finish(cluster, reference)
    check_in_order(outcome, 0)
    assert outcome.report.controller_restarts == 1
    assert [job.made for job in cluster.jobs] == [2, 1, 1]


def test_a_pod_that_is_drained_by_hand_is_not_made_again(cluster: "Kubernetes", reference: Outcome) -> None:
    begun = time.monotonic()
    index = cluster.nodes.index(cluster.node_of(0))
    arguments = ("drain", str(cluster.run_dir), "node-1", "--token-file", str(cluster.directory / "token"))
    cluster.run_on(index, *arguments, label="-drain")
    timed(cluster, "drained by hand: the pod has ended", lambda: cluster.jobs[1].ends == [0], begun)
    assert cluster.launchers.pop(f"h{index}-drain").wait(DEADLINE_SECONDS) == 0
    check_in_order(finish(cluster, reference), 1)
    assert [job.made for job in cluster.jobs] == [1, 1, 1]


@pytest.mark.parametrize("number", [1, 0], ids=["a rank", "the controller and a rank"])
def test_a_lost_node_is_replaced(cluster: "Kubernetes", reference: Outcome, number: int) -> None:
    begun, before, node = time.monotonic(), joined(cluster), cluster.node_of(number)
    name = "lost head" if number == 0 else "lost"
    cluster.lose_node(number)
    timed(cluster, f"{name}: training again", lambda: "recovered in" in cluster.messages(), begun)
    cluster.forget_node(node)
    begun = time.monotonic()
    timed(cluster, f"{name}: a new pod has joined since its node is gone", lambda: joined(cluster) > before, begun)
    outcome = finish(cluster, reference)
    assert [(f.rank, f.kind) for f in outcome.report.failures] == [(number, "host lost")], outcome.describe()
    assert outcome.report.controller_restarts == int(number == 0)
    assert cluster.jobs[number].made == 2


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_gpu_that_reports_a_fault_has_another_pod_made_elsewhere(tmp_path: Path, reference: Outcome) -> None:
    with training_beside_a_device(tmp_path) as (cluster, driver, number):
        begun, before = time.monotonic(), joined(cluster)
        cluster.offer_no_device(number)
        driver.say("xid 0 95")
        timed(cluster, "fault: the pod has ended", lambda: cluster.jobs[number].ends == [FAULT_STATUS], begun)
        timed(cluster, "fault: a new pod has joined", lambda: joined(cluster) > before, begun)
        outcome = finish(cluster, reference)
    check_in_order(outcome, number)
    assert any("reported a fault" in text and "XID 95" in text for text in outcome.report.notices), outcome.describe()
    assert cluster.jobs[number].made == 2


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_pod_on_a_machine_with_a_fault_refuses_until_the_node_is_cordoned(tmp_path: Path, reference: Outcome) -> None:
    """The cluster gives the machine again, since nothing tells it of the fault."""
    with training_beside_a_device(tmp_path) as (cluster, driver, number):
        driver.say("xid 0 95")
        begun = time.monotonic()
        refused = f"node-{number} came on h1, which reported a fault"
        timed(cluster, "fault: a pod has come to the machine again", lambda: refused in cluster.messages(), begun)
        assert "`kubectl cordon h1`" in cluster.messages()
        cluster.cordon("h1")
        begun, told = time.monotonic(), f"node-{number} joined; 3 hosts"
        timed(cluster, "cordoned: a pod has joined elsewhere", lambda: told in cluster.messages(), begun)
        assert cluster.node_of(number) == "h3"
        outcome = finish(cluster, reference)
    check_in_order(outcome, number)
    ends = cluster.jobs[number].ends
    assert set(ends[:-1]) == {FAULT_STATUS}, ends
    assert ends[-1] == 0, ends
    assert 3 <= len(ends) <= 5, ends  # it was given back once at least, and three times at most
    assert any(refused in text for text in outcome.report.notices), outcome.describe()


def stop(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def test_a_controller_that_was_stopped_does_not_act_when_it_wakes_up(cluster: "Kubernetes", reference: Outcome) -> None:
    first, before = cluster.lease()["holderIdentity"], joined(cluster)
    stopped = cluster.processes_of(0)
    stop(stopped, signal.SIGSTOP)
    cluster.wait_until(lambda: cluster.lease()["holderIdentity"] not in ("", first), "another holds the Lease")
    cluster.wait_until(lambda: "recovered in" in cluster.messages(), "it trains again")
    lives = cluster.journal().count('"ControllerRestarted"')
    stop(stopped, signal.SIGCONT)
    cluster.wait_until(lambda: "this controller ends" in cluster.messages(), "the old controller has ended")
    cluster.wait_until(lambda: joined(cluster) > before, "the host that woke up has joined again")
    outcome = finish(cluster, reference)
    assert outcome.report.controller_restarts == lives == 1
    _, lines = read_journal(cluster.run_dir / "journal.jsonl")
    times = [line.now for line in lines]
    assert times == sorted(times)  # of one controller after the other: none has written among another one's lines


def test_while_the_api_server_is_away_nothing_acts_and_training_goes_on(
    cluster: "Kubernetes", reference: Outcome
) -> None:
    cluster.api.emulator.is_down = True
    cluster.wait_until(lambda: "its Lease is lost; this controller ends" in cluster.messages(), "the Lease runs out")
    cluster.wait_for_steps(3)
    cluster.api.emulator.is_down = False
    cluster.wait_until(lambda: '"ControllerRestarted"' in cluster.journal(), "a controller holds the Lease again")
    outcome = finish(cluster, reference)
    assert [f for f in outcome.report.failures if f.rank >= 0] == [], outcome.describe()
    assert [job.made for job in cluster.jobs] == [1, 1, 1]


def test_pods_ask_for_nothing_but_their_lease(cluster: "Kubernetes", reference: Outcome) -> None:
    token = "the token of the pods"
    lease = path_of("Lease", "relight")
    for method, path in (
        ("GET", path_of("Pod")),
        ("DELETE", lease),
        ("POST", path_of("Lease")),
        ("GET", lease.replace("relight", "another")),
        ("GET", lease.replace(f"/{NAMESPACE}/", "/another/")),
    ):
        assert cluster.api.ask(method, path, {"metadata": {}}, token)[0] == 403, (method, path)
    cluster.api.emulator.asked.clear()
    begun = time.monotonic()
    cluster.wait_for_steps(10)
    seconds = time.monotonic() - begun
    asked = list(cluster.api.emulator.asked)
    assert {(verb, path) for _, verb, path in asked} <= {("get", lease), ("update", lease)}
    assert len(asked) <= 2 + 7 * seconds / LEASE_SECONDS  # the holder renews; who waits asks nothing
    finish(cluster, reference)
    assert cluster.lease()["holderIdentity"] == ""  # released, so that the next job need not wait
