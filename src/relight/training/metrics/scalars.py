"""Values that a script reports, on their way to loggers: each committed step once, also if rank 0 is replaced.

Rank 0 writes one line to `scalars.jsonl` of the run directory as it commits a step. What was reported before the
barrier is kept with the rank-private state too: if rank 0 dies between the barrier and that line, its replacement,
which never computes the step, writes it. Loggers are fed from the file, by a thread (`loggers.py`), so a slow one costs
no step anything.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from relight.errors import UsageError
from relight.training.metrics.loggers import Feed, Kind, check_logger
from relight.training.process.runtime import Runtime

FILE_NAME = "scalars.jsonl"
Value = float | torch.Tensor
_TAIL_BYTES = 64 * 1024  # holds the last line, whatever was reported
_TAKEN = frozenset({"step", "time"})


class Scalars:
    """Values that `Step.report` was given; kept only for a logger. Errors are reported, and fail no training."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._worker = runtime.worker
        self._loggers: list[Kind] = []
        self._pending: dict[str, Value] = {}  # of the step under way
        self._path = Path(runtime.settings.run_dir) / FILE_NAME
        self._descriptor: int | None = None
        self._last = -1  # newest step in the file
        self._feed: Feed | None = None

    def log_to(self, logger: Any) -> None:
        """See `Training.log_to`."""
        self._loggers.append(check_logger(logger, self._runtime.settings))

    @property
    def _is_mine(self) -> bool:
        return bool(self._loggers) and self._runtime.rank == 0 and not self._runtime.is_rehearsing

    # --- during a step ------------------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """Drop values of an earlier attempt: only the repetition of a step counts."""
        self._pending.clear()

    def report(self, values: Mapping[str, Value]) -> None:
        """Take values of the step under way. Raises UsageError for what is no number."""
        if not self._is_mine:
            return
        if not self._runtime.protection.in_step:
            self._say("step.report(...) stands outside of the block `with step`: what it is given there is not logged")
            return
        for name, value in values.items():
            self._pending[name] = _checked(name, value)

    @property
    def has_private(self) -> bool:
        """True if there is anything for `private` to say."""
        return bool(self._pending) and self._is_mine

    def private(self) -> dict[str, Any]:
        """Return the values of the step under way, for the rank-private state that is kept at the barrier."""
        if not self.has_private:
            return {}
        return {"scalars": {"step": self._worker.version, "values": _read(self._pending)}}

    def commit(self, step: int) -> None:
        """Write the values of a committed step."""
        if self._is_mine and self._pending:
            self._write(step, _read(self._pending))
        self._pending.clear()

    # --- after a recovery ---------------------------------------------------------------------------------------
    def catch_up(self) -> None:
        """Write what the predecessor at rank 0 reported of the last step, if it died before it could."""
        if not self._is_mine or self._last >= self._worker.version - 1:
            return
        kept = self._runtime.page.read_private_tree(self._worker.version).get("scalars")
        if kept is not None and kept["step"] == self._worker.version - 1:
            self._write(kept["step"], kept["values"])

    def finish(self, patience_seconds: float) -> None:
        """Feed the loggers all values before the job ends."""
        if self._feed is not None:
            self._feed.finish(patience_seconds)

    # --- the file -----------------------------------------------------------------------------------------------
    def _write(self, step: int, values: Mapping[str, float]) -> None:
        try:
            if self._descriptor is None:
                self._open()
            assert self._descriptor is not None
            if step <= self._last:
                return
            line = {"step": step, "time": round(time.time(), 3)} | {n: _encoded(v) for n, v in values.items()}
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")  # at once: half a line is no line
            self._last = step
        except OSError as error:
            self._say(f"{self._path} cannot be written ({error.strerror or error}): what steps report is lost")
            return
        assert self._feed is not None
        self._feed.wake()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)  # on another host than the first
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        tail = os.pread(self._descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        if tail and not tail.endswith(b"\n"):
            os.write(self._descriptor, b"\n")
        for line in reversed(tail.splitlines()):
            try:
                self._last = int(json.loads(line)["step"])
                break
            except (ValueError, KeyError, TypeError):
                continue
        self._feed = Feed(self._path, self._loggers, self._say)

    def _say(self, text: str) -> None:
        self._runtime.notices.say(f"log {text}", f"logging: {text}")


def _checked(name: str, value: Value) -> Value:
    if name in _TAKEN:
        raise UsageError(f"step.report({name}=...): the file of reported values has a {name} already; choose another")
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(
                f"step.report({name}=...): a tensor of shape {tuple(value.shape)}; report a number, such as its mean"
            )
        # Reading one that lies on a device would wait for it; at the barrier all ranks wait anyway.
        return float(value.detach()) if value.device.type == "cpu" else value.detach().clone()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"step.report({name}={value!r}): a number, or a tensor with one element") from None


def _read(values: Mapping[str, Value]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _encoded(value: float) -> float | str:
    """JSON has no number for these; `float` reads the words."""
    return value if math.isfinite(value) else str(value)
