"""Bad networks between a host and the controller: late, trickling, broken, half open, deaf in one direction.

Whatever the line does, the job ends with the bits of an undisturbed one. A proxy can stand only between hosts: the
agent asks the kernel who is at the other end of a worker's socket, and a proxy is not that worker.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.pair import Pair
from tests.hosts.proxy import DOWN, NONE, UP, Fault
from tests.survival.harness import Bench, Outcome, Training
from tests.survival.judge import check_survived

pytestmark = pytest.mark.all
TRAINING = Training(ranks=2, steps=205, arguments=("--pause", "0.02", "--tell", "--hold-at", "200"))
RESETS = (0, 3, 40, 200, 700, 1500, 4000, 10_000)  # in the handshake, in a frame, between frames, far into it
SLOW = Fault(latency_seconds=0.05, jitter_seconds=0.1)
TRICKLE = Fault(piece_bytes=13)
BOTH = (UP, DOWN)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    directories = iter([tmp_path_factory.mktemp("reference")])
    return Bench(lambda: next(directories)).reference(TRAINING)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with Pair(tmp_path, TRAINING, "--agent-timeout-seconds", "5", "--stop-timeout-seconds", "5") as pair:
        yield pair


def begin(pair: Pair) -> None:
    pair.wait_until(lambda: "committed 3" in pair.output(), "training has begun")
    pair.wait_until(lambda: pair.journal().count('"StandbyReady"') >= 2, "both standbys are warm")


def recovered(pair: Pair, times: int = 1) -> None:
    pair.wait_until(lambda: pair.messages().count("recovered in") >= times, f"the job has recovered {times} times")


def finish(pair: Pair, reference: Outcome) -> Outcome:
    pair.release()
    outcome = pair.wait()
    check_survived(outcome, reference)
    return outcome


@pytest.mark.parametrize("fault", [SLOW, TRICKLE], ids=["slow", "trickle"])
def test_a_line_that_is_slow_from_the_start(pair: Pair, reference: Outcome, fault: Fault) -> None:
    for direction in BOTH:
        pair.proxy.set(direction, fault)
    begin(pair)
    pair.kill("w1")  # over there
    recovered(pair)
    outcome = finish(pair, reference)
    assert [failure.rank for failure in outcome.report.failures] == [1], outcome.describe()


@pytest.mark.parametrize("direction", BOTH)
def test_connections_that_are_reset_at_every_place(pair: Pair, reference: Outcome, direction: str) -> None:
    """Nothing is lost that must arrive, and no host is given up: it is away for moments."""
    begin(pair)
    for number, place in enumerate(RESETS):
        before = pair.proxy.resets
        pair.proxy.set(direction, Fault(reset_at=place))
        pair.wait_until(lambda before=before: pair.proxy.resets > before, "a reset")  # type: ignore[misc]
        pair.proxy.set(direction, NONE)
        if number == len(RESETS) // 2:
            pair.kill("w1")
    recovered(pair)
    outcome = finish(pair, reference)
    assert [failure.rank for failure in outcome.report.failures] == [1], outcome.describe()


@pytest.mark.parametrize("direction", BOTH)
def test_a_line_that_ends_in_one_direction(pair: Pair, reference: Outcome, direction: str) -> None:
    begin(pair)
    before = pair.proxy.connections
    pair.proxy.set(direction, Fault(close_at=300))
    pair.wait_until(lambda: pair.proxy.connections >= before + 3, "it has been tried again and again")
    pair.proxy.set(direction, NONE)
    pair.kill("w1")
    recovered(pair)
    finish(pair, reference)


@pytest.mark.parametrize("direction", BOTH)
def test_one_direction_is_deaf_for_a_moment_in_which_a_rank_dies(
    pair: Pair, reference: Outcome, direction: str
) -> None:
    begin(pair)
    pair.proxy.set(direction, Fault(held=True))
    pair.wait_for_steps(20)  # training does not need the line
    pair.kill("w1")
    pair.proxy.set(direction, NONE)
    recovered(pair)
    outcome = finish(pair, reference)
    assert [failure.rank for failure in outcome.report.failures] == [1], outcome.describe()
