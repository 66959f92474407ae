"""An emulated Kubernetes: a pod is evicted, a node is lost. Figures that are printed are those of the emulation."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import missing
from tests.clusters.pods import Pods
from tests.survival.harness import DEADLINE_SECONDS, Bench, Outcome, Training
from tests.survival.judge import check_survived

REASON = missing()
pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(600),
]
STEPS = 205
TRAINING = Training(ranks=2, steps=STEPS, arguments=("--pause", "0.2", "--tell", "--hold-at", str(STEPS - 5)))
UNPAUSED = Training(ranks=2, steps=STEPS, arguments=("--tell",))  # the same bits; there is nothing to wait for


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """This training on one host, undisturbed."""
    directories = iter([tmp_path_factory.mktemp("reference")])
    return Bench(lambda: next(directories)).reference(UNPAUSED)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """Two pods with a rank each, and a spare, which train."""
    with Pods(tmp_path, TRAINING, 2, standbys=1, spare=1) as cluster:
        cluster.start("--preload", "torch")
        cluster.wait_until(lambda: "committed 3" in cluster.output(), "training has begun")
        cluster.wait_until(lambda: '"StandbyReady"' in cluster.journal(), "the standby is warm")
        yield cluster


def joined(pods: Pods) -> int:
    return pods.journal().count('"AgentJoined"')


def finish(pods: Pods, reference: Outcome) -> Outcome:
    pods.release()
    outcome = pods.wait()
    check_survived(outcome, reference)
    pods.check_nothing_is_left()
    return outcome


def test_an_evicted_pod_is_left_in_order_and_made_again(pods: Pods, reference: Outcome) -> None:
    begun, before = time.monotonic(), joined(pods)
    pods.launchers["h1"].send_signal(signal.SIGTERM)
    assert pods.make_again(1, DEADLINE_SECONDS) == 143, pods.describe()  # 0 would say that the node is done
    print(f"evicted: the pod ended after {time.monotonic() - begun:.1f} s (emulated)")
    pods.wait_until(lambda: joined(pods) > before, "the new pod has joined")
    print(f"evicted: a new pod joined after {time.monotonic() - begun:.1f} s (emulated)")
    outcome = finish(pods, reference)
    assert [(f.rank, f.kind) for f in outcome.report.failures] == [(1, "drained")], outcome.describe()
    (recovery,) = outcome.report.recoveries
    assert (recovery.steps_repeated, recovery.steps_undone) == (0, 0), outcome.describe()


def test_a_lost_node_is_replaced_by_the_spare_and_its_pod_is_made_again(pods: Pods, reference: Outcome) -> None:
    begun, before = time.monotonic(), joined(pods)
    pods.lose(1)
    pods.wait_until(lambda: "recovered in" in pods.messages(), "it trains again")
    print(f"lost: training again after {time.monotonic() - begun:.1f} s (emulated)")
    pods.heal(1)
    assert pods.make_again(1, DEADLINE_SECONDS), pods.describe()
    pods.wait_until(lambda: joined(pods) > before, "the new pod has joined")
    outcome = finish(pods, reference)
    assert [(f.rank, f.kind) for f in outcome.report.failures] == [(1, "host lost")], outcome.describe()
