"""Effects of steps on loggers and checkpoint files, once for each committed step, also if rank 0 is replaced.

Log entries and removals of files are kept back until their step is committed. Files are written at once, and removed
again if the step is undone. A note in the run directory says how far rank 0 has come, for the process that replaces it.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.loggers.csv_logs import CSVLogger
from lightning.fabric.utilities.cloud_io import get_filesystem

import relight

_NOTE = "lightning.json"
_Entry = list[Any]  # number of the logger, values, step


class Effects:
    """Log entries and files of the step under way. Only rank 0 has any."""

    def __init__(self, job: relight.Job, trainer: Any) -> None:
        self._job = job
        self._trainer = trainer
        self._note = job.run_dir / _NOTE
        self._step = -1  # to which the entries and removals belong
        self._entries: list[_Entry] = []
        self._removals: list[str] = []
        self._files: list[str] = []  # that the step under way has made
        self._done: int | None = None  # the newest step whose effects have been carried out; None: the note says it
        self._defers = False
        self._was_standby = job.is_standby
        for number, logger in enumerate(trainer.loggers):
            self._watch(number, logger)

    # --- what a step does -----------------------------------------------------------------------------------------
    def _watch(self, number: int, logger: Any) -> None:
        log, save = logger.log_metrics, logger.save

        def log_metrics(metrics: dict[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> None:
            if not self._defers:
                log(metrics, step, *args, **kwargs)
            elif self._job.rank == 0:
                self._entries.append([number, {name: _number(value) for name, value in metrics.items()}, step])

        def save_() -> None:
            if not self._defers:
                save()

        logger.log_metrics, logger.save = log_metrics, save_

    def note_file(self, path: str) -> None:
        """A checkpoint is about to be written to `path`, on rank 0."""
        if self._defers and not get_filesystem(path).exists(path):
            self._files.append(path)
            self._write_note()

    def remove_later(self, path: str) -> None:
        """Remove a checkpoint when the step is committed."""
        if self._job.rank == 0:
            self._removals.append(path)

    # --- when -----------------------------------------------------------------------------------------------------
    def begin(self, step: int, *, rehearses: bool = False) -> None:
        """Begin an attempt at a step: on rank 0, finish what the one before has left, and undo earlier attempts."""
        if self._job.rank == 0 and not rehearses:
            if self._done is None:
                self._take_over(step)
            if self._step == step - 1:
                self._carry_out()
            for path in self._files:
                _remove(path)
        self._step, self._entries, self._removals, self._files = step, [], [], []
        self._defers = True

    def end(self, *, committed: bool) -> None:
        """The block is left."""
        self._defers = False
        if committed and self._job.rank == 0:
            self._carry_out()

    def close(self) -> None:
        """The loop of steps is over: finish what the last one has left to a process that replaced rank 0."""
        if self._job.rank == 0:
            if self._done is None:
                self._take_over(self._step + 1)
            self._carry_out()

    def _carry_out(self) -> None:
        if self._done is not None and self._done >= self._step:
            return
        loggers = self._trainer.loggers
        for number, values, step in self._entries:
            loggers[number].log_metrics(values, step)
        for number in sorted({entry[0] for entry in self._entries}):
            loggers[number].save()
        for path in self._removals:
            _remove(path)
        self._done = self._step
        if self._entries or self._removals or self._files:
            self._files = []
            self._write_note()

    def _write_note(self) -> None:
        content = {"done": -1 if self._done is None else self._done, "step": self._step, "files": self._files}
        draft = self._note.with_suffix(".new")
        draft.write_text(json.dumps(content))
        os.replace(draft, self._note)

    def _take_over(self, step: int) -> None:
        """Read the note of the process that was rank 0 before, if there was one."""
        note = json.loads(self._note.read_text()) if self._was_standby and self._note.exists() else {}
        self._done = note.get("done", -1)
        if note.get("step") == step:
            self._files = note["files"]
        for logger in self._trainer.loggers:
            if self._was_standby and isinstance(logger, CSVLogger):
                _continue_csv(logger)

    # --- for the process that replaces rank 0 ---------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return what is kept back."""
        return {"step": self._step, "entries": self._entries, "removals": self._removals}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._step, self._entries, self._removals = saved["step"], saved["entries"], saved["removals"]


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _remove(path: str) -> None:
    files = get_filesystem(path)
    if files.exists(path):
        files.rm(path, recursive=True)


def _continue_csv(logger: Any) -> None:
    """Open the logger's file without the loss of its lines: by itself it deletes a file that is there."""
    path = Path(logger.log_dir) / "metrics.csv"
    kept = path.with_suffix(".kept")
    if path.exists():
        os.replace(path, kept)
    writer = logger.experiment
    if kept.exists():
        os.replace(kept, path)
        writer.metrics_keys = path.read_text().split("\n", 1)[0].strip().split(",")
