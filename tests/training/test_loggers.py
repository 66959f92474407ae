"""Loggers are given every step once, in order, whichever process begins where another stopped."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from relight.errors import UsageError
from relight.training.metrics.loggers import Feed, Kind, check_logger
from relight.wire.settings import JobSettings

SECONDS = 30.0


class Remembering:
    """A logger as a user might write one."""

    def __init__(self, fails_at: int = -1) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.flushed = self.closed = 0
        self._fails_at = fails_at

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        if step == self._fails_at:
            raise ConnectionError("the server went away")
        self.seen.append((step, values))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1


def settings(run_dir: Path) -> JobSettings:
    return JobSettings(job="a job", script="train.py", run_dir=str(run_dir))


def append(path: Path, *steps: int) -> None:
    with path.open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "time": 1.5, "loss": step / 2, "bad": "nan"}) + "\n")


def feed(path: Path, *kinds: Kind, wakes: int = 1) -> list[str]:
    """Feed all that is there; returns what was said."""
    said: list[str] = []
    fed = Feed(path, kinds, said.append)
    fed.finish(SECONDS)
    return said


def test_every_line_once_and_in_order(tmp_path: Path) -> None:
    path, logger = tmp_path / "scalars.jsonl", Remembering()
    append(path, 0, 1, 2)
    assert feed(path, check_logger(logger, settings(tmp_path))) == []
    assert [step for step, _ in logger.seen] == [0, 1, 2]
    assert set(logger.seen[1][1]) == {"loss", "bad"}
    assert logger.seen[1][1]["loss"] == 0.5
    assert logger.seen[1][1]["bad"] != logger.seen[1][1]["bad"]  # not a number
    assert logger.flushed >= 1
    assert logger.closed == 0  # the script that made it closes it


def test_another_process_goes_on_where_the_first_one_stopped(tmp_path: Path) -> None:
    path, first, second = tmp_path / "scalars.jsonl", Remembering(), Remembering()
    append(path, 0, 1, 2)
    feed(path, check_logger(lambda: first, settings(tmp_path)))
    append(path, 3, 4)
    begun: list[int] = []

    def kind(step: int) -> Any:
        begun.append(step)
        return check_logger(lambda: second, settings(tmp_path))(step)

    feed(path, kind)
    assert [step for step, _ in first.seen] == [0, 1, 2]
    assert [step for step, _ in second.seen] == [3, 4]
    assert begun == [3]
    assert (first.closed, second.closed) == (1, 1)  # made here, closed here


def test_what_was_not_remembered_is_fed_again(tmp_path: Path) -> None:
    """Better twice than never; those that know about steps are told where they begin anew."""
    path, logger = tmp_path / "scalars.jsonl", Remembering()
    append(path, 0, 1)
    feed(path, check_logger(Remembering(), settings(tmp_path)))
    mark = (tmp_path / "scalars.fed").read_bytes()
    append(path, 2, 3)
    feed(path, check_logger(Remembering(), settings(tmp_path)))
    (tmp_path / "scalars.fed").write_bytes(mark)  # the death came first
    feed(path, check_logger(logger, settings(tmp_path)))
    assert [step for step, _ in logger.seen] == [2, 3]


def test_lines_are_fed_while_they_come(tmp_path: Path) -> None:
    path, arrived = tmp_path / "scalars.jsonl", threading.Event()

    class Telling(Remembering):
        def log_metrics(self, values: dict[str, float], step: int) -> None:
            super().log_metrics(values, step)
            arrived.set()

    logger = Telling()
    path.touch()
    said: list[str] = []
    fed = Feed(path, [check_logger(logger, settings(tmp_path))], said.append)
    for step in range(3):
        arrived.clear()
        append(path, step)
        fed.wake()
        assert arrived.wait(SECONDS)
    with path.open("a") as file:
        file.write('{"step": 3, "time"')  # a process is writing it
    fed.finish(SECONDS)
    assert [step for step, _ in logger.seen] == [0, 1, 2]
    assert said == []


def test_a_logger_that_fails_is_named_and_harms_no_other(tmp_path: Path) -> None:
    path, bad, good = tmp_path / "scalars.jsonl", Remembering(fails_at=1), Remembering()
    append(path, 0, 1, 2)

    def impossible() -> Remembering:
        raise RuntimeError("no account")

    kinds = [check_logger(logger, settings(tmp_path)) for logger in (impossible, bad, lambda: 7, good)]
    said = feed(path, *kinds)
    assert [step for step, _ in good.seen] == [0, 1, 2]
    assert [step for step, _ in bad.seen] == [0]
    assert len(said) == 3
    assert "no account" in said[0]
    assert "which is no logger" in said[1]
    assert "the server went away" in said[2]


@pytest.mark.parametrize("asked", [7, None, "mlflow", object()])
def test_what_is_no_logger_is_refused(tmp_path: Path, asked: object) -> None:
    with pytest.raises(UsageError, match="log_to"):
        check_logger(asked, settings(tmp_path))


@pytest.mark.parametrize("method", ["add_scalar", "log", "log_metrics"])
def test_loggers_of_every_kind(tmp_path: Path, method: str) -> None:
    path, seen = tmp_path / "scalars.jsonl", []
    append(path, 4)
    if method == "add_scalar":
        logger = type("W", (), {method: lambda self, name, value, step: seen.append((name, value, step))})()
    else:
        logger = type("W", (), {method: lambda self, values, *, step: seen.append(("loss", values["loss"], step))})()
    assert feed(path, check_logger(logger, settings(tmp_path))) == []
    assert seen[0] == ("loss", 2.0, 4)


@pytest.mark.all  # importing it takes seconds
def test_tensorboard_shows_each_step_once_also_what_was_fed_twice(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    path = tmp_path / "scalars.jsonl"
    append(path, *range(10))
    feed(path, check_logger("tensorboard", settings(tmp_path)))
    mark = (tmp_path / "scalars.fed").read_bytes()
    append(path, *range(10, 20))
    feed(path, check_logger("tensorboard", settings(tmp_path)))
    (tmp_path / "scalars.fed").write_bytes(mark)
    feed(path, check_logger("tensorboard", settings(tmp_path)))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(n, n / 2) for n in range(20)]
