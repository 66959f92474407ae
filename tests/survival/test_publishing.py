"""Engines beside a job that fails: they get every version whole, and at the end exactly the trainer's weights."""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import relight
from relight.transfer.relay.publish_bridge import PublishBridge
from relight.transfer.relay.relay import Relay
from relight.watch.feed import write_events
from tests.programs.train import Net
from tests.survival.harness import DEADLINE_SECONDS, Bench, Training
from tests.survival.judge import check_survived

STEPS = 12
TOKEN = b"the token of these tests"
TRAINING = Training(steps=STEPS, arguments=("--batchnorm", "--publish", "2"))


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((), marks=pytest.mark.all),
        ("kill rank 0 in BACKWARD of step 5",),
        ("kill rank 1 in OPTIMIZER of step 5",),
        pytest.param(("kill rank 0 in OPTIMIZER of step 4",), marks=pytest.mark.all),
        pytest.param(("freeze rank 0 in BARRIER of step 6",), marks=pytest.mark.all),
        pytest.param(("kill rank 0 after step 4", "kill rank 0 in FORWARD of step 9"), marks=pytest.mark.all),
    ],
    ids=lambda faults: " and ".join(faults) or "undisturbed",
)
def test_an_engine_ends_with_the_trainers_weights(bench: Bench, faults: Sequence[str]) -> None:
    reference = bench.reference(TRAINING)
    model = Net(64, 0.1, True)
    seen: list[tuple[int, int]] = []
    is_lent = False  # rank 0's memory is mapped here
    with (
        bench.start(TRAINING, faults=faults, standbys=2) as job,
        relight.Receiver(job.run_dir, model=model) as receiver,
    ):
        while job.launcher.poll() is None and not receiver.wait_for(STEPS, 0.02):
            with receiver.serving() as version:
                seen.append((receiver.generation, version))
            is_lent = is_lent or "relight-lent" in Path("/proc/self/maps").read_text()
        outcome = job.wait(DEADLINE_SECONDS)
        digest = receiver.digest()
    check_survived(outcome, reference)
    assert "another publisher is alive" not in outcome.stderr  # rank 0's predecessor, for a moment
    assert receiver.version == STEPS, outcome.describe()
    assert digest == outcome.finals[0]["weights"]
    assert is_lent
    assert seen == sorted(seen)
    published = outcome.report.published
    assert published is not None
    assert list(published.engines.values()) == [STEPS]
    assert published.updates >= 1
    lines: list[bytes] = []
    write_events(outcome.run_dir, lines.append, follow=False)
    told = [event for event in map(json.loads, lines) if event["event"] == "weights_published"]
    assert list(told[-1]["engines"].values()) == [STEPS]


def test_the_last_version_waits_for_the_place_of_a_dead_predecessor(bench: Bench) -> None:
    """The predecessor has it until its memory is freed; a job of short steps is over before that."""
    training = dataclasses.replace(TRAINING, arguments=(*TRAINING.arguments, "--tell"))
    model = Net(64, 0.1, True)
    with bench.start(training, faults=("kill rank 0 in BACKWARD of step 5",), standbys=2) as job:
        job.run_dir.mkdir(exist_ok=True)
        with relight.Publisher(job.run_dir):
            job.wait_until(lambda: f"committed {STEPS - 1}" in (job.directory / "stdout").read_text(), "all steps")
        with relight.Receiver(job.run_dir, model=model) as receiver:
            outcome = job.wait(DEADLINE_SECONDS)
            assert receiver.version == STEPS, outcome.describe()
            assert receiver.digest() == outcome.finals[0]["weights"]


@pytest.mark.all
@pytest.mark.parametrize(
    "faults",
    [pytest.param((), marks=pytest.mark.all), ("kill rank 0 in BACKWARD of step 6",)],
    ids=lambda faults: " and ".join(faults) or "undisturbed",
)
def test_an_engine_on_another_host_ends_with_the_trainers_weights(
    bench: Bench, tmp_path: Path, faults: Sequence[str]
) -> None:
    training = dataclasses.replace(TRAINING, arguments=(*TRAINING.arguments, "--hold-at", "4", "--pause", "0.1"))
    reference = bench.reference(training)
    model = Net(64, 0.1, True)
    with (
        bench.start(training, faults=faults, standbys=2) as job,
        PublishBridge(job.run_dir, "127.0.0.1", token=TOKEN) as bridge,
        running(Relay(bridge.endpoint, tmp_path, token=TOKEN)),
        relight.Receiver(tmp_path, model=model) as receiver,
    ):
        # Held at a step by which rank 0 has published.
        job.wait_until((tmp_path / "weights.sock").exists, "the relay has reached the publisher")
        job.release()
        while job.launcher.poll() is None and not receiver.wait_for(STEPS, 0.02):
            with receiver.serving() as version:
                assert version <= STEPS
        outcome = job.wait(DEADLINE_SECONDS)
        digest = receiver.digest()
    check_survived(outcome, reference)
    assert (receiver.version, digest) == (STEPS, outcome.finals[0]["weights"])


@contextlib.contextmanager
def running(relay: Relay) -> Iterator[None]:
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        yield
    finally:
        relay.stop()
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


def test_publishing_changes_no_bit(bench: Bench) -> None:
    plain = bench.reference(dataclasses.replace(TRAINING, arguments=("--batchnorm",)))
    assert bench.reference(TRAINING).finals == plain.finals


def test_a_job_without_engines_does_not_wait_for_any(bench: Bench) -> None:
    outcome = bench.run(TRAINING, faults=["kill rank 0 in BACKWARD of step 5"])
    check_survived(outcome, bench.reference(TRAINING))
    assert not (outcome.run_dir / "weights.sock").exists()
    assert outcome.report.published is not None
    assert outcome.report.published.engines == {}
