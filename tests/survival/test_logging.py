"""Values that steps report reach the loggers once, as in an undisturbed run, whichever rank dies when."""

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.survival.harness import Bench, Outcome, Training
from tests.survival.judge import check_survived

STEPS = 9
LINES = Training(steps=STEPS, arguments=("--log", "lines"))


def recorded(outcome: Outcome) -> list[dict[str, Any]]:
    """The lines of scalars.jsonl, without their times."""
    lines = [json.loads(line) for line in (outcome.run_dir / "scalars.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def logged(outcome: Outcome) -> list[dict[str, Any]]:
    """Values that the script's own logger was given."""
    return [json.loads(line) for line in (outcome.run_dir.parent / "logged.jsonl").read_text().splitlines()]


def check_logged(outcome: Outcome, reference: Outcome) -> None:
    check_survived(outcome, reference)
    assert [line["step"] for line in recorded(reference)] == list(range(STEPS))
    assert recorded(outcome) == recorded(reference), outcome.describe()


def test_no_step_is_missing_and_none_is_there_twice(bench: Bench) -> None:
    """Rank 0 dies behind the barrier: its replacement never computes the step that it must log."""
    outcome = bench.run(LINES, faults=("kill rank 0 in OPTIMIZER of step 4",))
    assert outcome.status == 0, outcome.describe()
    lines = recorded(outcome)
    assert [line["step"] for line in lines] == list(range(STEPS)), outcome.describe()
    assert [line["number"] for line in lines] == list(range(STEPS))
    assert {line["step"] for line in logged(outcome)} == set(range(STEPS))


@pytest.mark.all
@pytest.mark.parametrize(
    ("faults", "holders"),
    [
        (("kill rank 0 in OPTIMIZER of step 4",), 2),
        (("kill rank 1 in BACKWARD of step 4",), 1),
        (("kill rank 0 in FORWARD of step 0",), 1),
        (("kill rank 0 in BACKWARD of step 4",), 2),
        (("kill rank 0 in BARRIER of step 4",), 2),
        (("kill rank 0 after step 4",), 2),
        (("freeze rank 0 in OPTIMIZER of step 4",), 2),
        (("kill rank 0 after step 3", "kill rank 0 in OPTIMIZER of step 4"), 3),
        (("kill rank 0 in OPTIMIZER of step 8",), 2),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, tuple) else "",
)
def test_each_step_is_logged_once(bench: Bench, faults: Sequence[str], holders: int) -> None:
    reference = bench.reference(LINES)
    outcome = bench.run(LINES, faults=faults, standbys=2)
    check_logged(outcome, reference)
    given = logged(outcome)
    steps = [line["step"] for line in given]
    assert sorted(set(steps)) == list(range(STEPS))
    # A logger that keeps no steps may be given some again, if a death came between its having them and the note of it.
    assert [{k: v for k, v in line.items() if k != "pid"} for line in _last_of_each(given)] == recorded(reference)
    assert len({line["pid"] for line in given}) in range(1, holders + 1)


def _last_of_each(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]


@pytest.mark.all
@pytest.mark.parametrize("fault", ["kill rank 0 in OPTIMIZER of step 4", "kill rank 0 after step 6"])
def test_tensorboard_shows_each_step_once(bench: Bench, fault: str) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    training = Training(steps=STEPS, arguments=("--log", "tensorboard"))
    outcome = bench.run(training, faults=(fault,), standbys=1)
    check_logged(outcome, bench.reference(training))
    place = outcome.run_dir / "tensorboard"
    assert len(list(place.iterdir())) == 2  # a file of each holder of rank 0
    events = accumulator.EventAccumulator(str(place), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(STEPS))
    assert [event.value for event in events.Scalars("number")] == list(range(STEPS))
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(
        [line["loss"] for line in recorded(outcome)]
    )


@pytest.mark.all
def test_weights_and_biases_offline(bench: Bench) -> None:
    pytest.importorskip("wandb")
    training = Training(steps=STEPS, arguments=("--log", "wandb"))
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with bench.start(training, faults=("kill rank 0 in OPTIMIZER of step 4",), environment=environment) as job:
        outcome = job.wait()
    assert outcome.status == 0, outcome.describe()
    assert [line["step"] for line in recorded(outcome)] == list(range(STEPS))
    assert _wandb_steps(outcome.run_dir) == list(range(STEPS))


def _wandb_steps(run_dir: Path) -> list[int]:
    """The steps in the files that `wandb sync` would send."""
    from wandb.proto import wandb_internal_pb2

    steps = set()
    for path in run_dir.glob("wandb/offline-run-*/*.wandb"):
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for item in record.history.item if record.HasField("history") else ():
                if "number" in (item.key, *item.nested_key):
                    steps.add(int(float(item.value_json)))
    return sorted(steps)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of LevelDB's log format: a header, then pieces with checksum, length and kind, in blocks."""
    at, found = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no piece begins so late in a block
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        found += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield found
            found = b""
