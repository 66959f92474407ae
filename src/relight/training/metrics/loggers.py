"""Loggers: TensorBoard, Weights & Biases, and any object with one of their methods. Fed by a thread of rank 0.

The position of the loggers is noted beside the file (`scalars.fed`): a replacement of rank 0 continues from there.
Steps that were fed in the instant before a death, and not noted yet, are fed again: TensorBoard purges them first,
Weights & Biases takes a step once; another logger may then see these steps twice.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from relight.errors import UsageError
from relight.wire.settings import JobSettings

FEED_SECONDS = 0.25  # between two visits to the loggers
_READ_BYTES = 2**20
_MARK = "{:>20} {:>20}\n"  # bytes of the file that were fed, newest step among them

Values = dict[str, float]


class Logger(Protocol):
    """An open logger."""

    def add(self, step: int, values: Values) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


Kind = Callable[[int], Logger]  # opens one; the first step that it will get: it may hold that and later ones already


def check_logger(asked: Any, settings: JobSettings) -> Kind:
    """Return how to open the logger that `Training.log_to` was given. Called on every rank; rank 0 opens it."""
    if asked == "tensorboard":
        return _tensorboard(settings)
    if asked == "wandb":
        return _wandb(settings)
    if isinstance(asked, str):
        raise UsageError(f'log_to({asked!r}): "tensorboard", "wandb", a logger, or a function that makes one')
    if _method(asked) is not None:
        return lambda _: _Given(asked, is_ours=False)
    if callable(asked):
        return lambda _: _Given(asked(), is_ours=True)
    raise UsageError(
        f"log_to({type(asked).__qualname__}): a logger has add_scalar(name, value, step), log_metrics(values, step) or "
        "log(values, step=...)"
    )


def _tensorboard(settings: JobSettings) -> Kind:
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError('log_to("tensorboard"): it is not installed: pip install tensorboard')
    module = importlib.import_module("torch.utils.tensorboard")  # now, for a standby has no time later
    place = str(Path(settings.run_dir) / "tensorboard")
    return lambda first: _Given(module.SummaryWriter(place, purge_step=first), is_ours=True)


def _wandb(settings: JobSettings) -> Kind:
    if importlib.util.find_spec("wandb") is None:
        raise UsageError('log_to("wandb"): it is not installed: pip install wandb')
    module = importlib.import_module("wandb")
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", settings.job)[-64:]
    return lambda _: _Given(module.init(id=name, name=name, dir=settings.run_dir, resume="allow"), is_ours=True)


def _method(thing: Any) -> Callable[[int, Values], Any] | None:
    """Return how to give it the values of a step; None if it is no logger."""
    if callable(getattr(thing, "add_scalar", None)):
        return lambda step, values: [thing.add_scalar(name, value, step) for name, value in values.items()]
    if callable(getattr(thing, "log_metrics", None)):
        return lambda step, values: thing.log_metrics(values, step=step)
    if callable(getattr(thing, "log", None)):
        return lambda step, values: thing.log(values, step=step)
    return None


class _Given:
    """Any object with one of the methods."""

    def __init__(self, thing: Any, *, is_ours: bool) -> None:
        """`is_ours`: it was opened here, and is closed here."""
        method = _method(thing)
        if method is None:
            raise UsageError(f"the function given to log_to made a {type(thing).__qualname__}, which is no logger")
        self._thing = thing
        self._is_ours = is_ours
        self.add = method

    def flush(self) -> None:
        flush = getattr(self._thing, "flush", None)
        if callable(flush):
            flush()

    def close(self) -> None:
        self.flush()
        for name in ("close", "finish"):
            end = getattr(self._thing, name, None)
            if self._is_ours and callable(end):
                end()
                return


class Feed:
    """Gives every line of the file to every logger, in order, in a thread."""

    def __init__(self, path: Path, kinds: Sequence[Kind], say: Callable[[str], None]) -> None:
        """Begin at once. `say` is called from the thread with errors; a logger that fails gets no more values."""
        self._path = path
        self._mark = path.with_suffix(".fed")
        self._kinds = kinds
        self._say = say
        self._loggers: list[Logger] = []
        self._offset, self._step = self._recall()
        self._is_open = False
        self._wake = threading.Event()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relight-loggers", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is a new line."""
        self._wake.set()

    def finish(self, patience_seconds: float) -> None:
        """Feed the remaining lines, and close. Loggers that take longer than `patience_seconds` are abandoned."""
        self._is_ending.set()
        self._wake.set()
        self._thread.join(patience_seconds)
        if self._thread.is_alive():
            self._say(f"the loggers took too long; all values are in {self._path}")

    def _run(self) -> None:
        while not self._is_ending.is_set():
            self._wake.wait()
            self._wake.clear()
            self._feed()
            self._is_ending.wait(FEED_SECONDS)  # several steps at a time: a visit costs the training some of its time
        self._feed()
        for logger in self._loggers:
            self._tried(logger.close)

    def _feed(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while lines := _whole_lines(file.read(_READ_BYTES)):
                    self._give([json.loads(line) for line in lines if line.strip()])
                    self._offset += sum(len(line) for line in lines)
                    file.seek(self._offset)
                    self._remember()
        except (OSError, ValueError) as error:
            self._say(f"{self._path} cannot be read: {error}")

    def _give(self, steps: list[dict[str, Any]]) -> None:
        if not steps:
            return
        if not self._is_open:
            self._is_open = True
            first = 0 if self._step < 0 else self._step + 1
            opened = [self._tried(lambda kind=kind: kind(first)) for kind in self._kinds]  # type: ignore[misc]
            self._loggers = [logger for logger in opened if logger is not None]
        for logger in list(self._loggers):
            if self._tried(lambda logger=logger: _add_all(logger, steps)) is None:  # type: ignore[misc]
                self._loggers.remove(logger)
        self._step = steps[-1]["step"]

    def _tried(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`; report an error and return None if it fails."""
        try:
            return call()
        except Exception as error:  # an error of a logger must not end the training
            self._say(f"{type(error).__name__}: {error}; this logger gets nothing more, all values are in {self._path}")
            return None

    # --- what was fed -------------------------------------------------------------------------------------------
    def _recall(self) -> tuple[int, int]:
        with contextlib.suppress(OSError, ValueError):
            offset, step = map(int, self._mark.read_text().split())
            if offset <= self._path.stat().st_size:
                return offset, step
        return 0, -1

    def _remember(self) -> None:
        descriptor = os.open(self._mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, _MARK.format(self._offset, self._step).encode(), 0)
        finally:
            os.close(descriptor)


def _add_all(logger: Logger, steps: Sequence[dict[str, Any]]) -> bool:
    for line in steps:
        logger.add(line["step"], {name: float(v) for name, v in line.items() if name not in ("step", "time")})
    logger.flush()
    return True


def _whole_lines(data: bytes) -> list[bytes]:
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
