"""The training of jobs on several hosts, its undisturbed run, and the hosts."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.survival.harness import Bench, Outcome, Training
from tests.survival.judge import check_survived

STEPS = 105  # most of them for time to strike in, which pauses give at less cost than steps
# Without what only one rank has (the position of a stateful loader, say), which would be lost with its host.
TRAINING = Training(ranks=4, steps=STEPS, arguments=("--pause", "0.2", "--tell", "--hold-at", str(STEPS - 5)))
UNPAUSED = Training(ranks=4, steps=STEPS, arguments=("--tell",))  # the same bits; there is nothing to wait for


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A training on one host, undisturbed: where ranks run must not show in the bits."""
    directories = iter([tmp_path_factory.mktemp("reference")])
    return Bench(lambda: next(directories)).reference(UNPAUSED)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts with two ranks and, as the job has it, one standby each; a third one may join."""
    with Cluster(tmp_path, TRAINING, 2, standbys=2, spare=1) as hosts:
        yield hosts


def begin(cluster: Cluster, *flags: str, variables: Mapping[int, Mapping[str, str]] = {}) -> None:
    cluster.start(*flags, variables=variables)
    cluster.wait_until(lambda: "committed 3" in cluster.output(), "training has begun")
    cluster.wait_until(lambda: cluster.journal().count('"StandbyReady"') >= 2, "both standbys are warm")


def finish(cluster: Cluster, reference: Outcome) -> Outcome:
    cluster.release()
    outcome = cluster.wait()
    check_survived(outcome, reference)
    cluster.check_nothing_is_left()
    return outcome
