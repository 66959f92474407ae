"""Log entries of steps, handed to callbacks that report once for each committed step, also if a rank is replaced.

A callback whose `on_log` changes the Trainer's control, or what the callback holds, gets an entry in its step, as hooks
of other kinds are called. For the others, entries are kept back until their step is committed, and with the state of
the rank: a replacement hands over those that the process before it left. A note in the run directory says what a rank
has handed over last, so that no reporter gets an entry twice.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import relight
from relight.integrations.transformers.log_hooks import belongs_to_step

# Of a log, with the Trainer's step and epoch, and the places of the callbacks that get it once the step is committed.
_Entry = tuple[dict[str, float], int, float | None, list[int]]


class Logs:
    """The entries of the step under way."""

    def __init__(self, trainer: Any, job: relight.Job) -> None:
        self._trainer = trainer
        self._directory = job.run_dir
        if not job.is_standby:
            self._note.unlink(missing_ok=True)  # of an earlier job in the same directory
        self._step = -1  # to which the entries belong
        self._entries: list[_Entry] = []  # kept after they were handed over: what code after a block changes is doubted
        self._handed_over = -1  # the newest step whose entries this process has handed over
        self._defers = False

    def begin(self, step: int) -> None:
        """Begin an attempt at a step. Entries of an earlier one were left by the process that had this rank before."""
        if self._step < step:
            self._hand_over(is_left=True)
        self._step, self._entries, self._defers = step, [], True

    def end(self, *, committed: bool) -> None:
        """The block is left."""
        self._defers = False
        if committed:
            self._hand_over()

    def close(self) -> None:
        """The loop of steps is over: hand over what a process has left whose rank was taken after the last step."""
        self._hand_over(is_left=True)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, the Trainer's entry for callbacks is kept until its step is committed."""
        handler = self._trainer.callback_handler
        call = handler.on_log

        def keep(args: Any, state: Any, control: Any, logs: dict[str, float]) -> Any:
            if not self._defers:
                return call(args, state, control, logs)
            control.should_log = False
            at_once = [belongs_to_step(each) for each in handler.callbacks]
            later = [number for number, is_now in enumerate(at_once) if not is_now]
            self._entries.append((dict(logs), state.global_step, state.epoch, later))
            return self._call(logs, [number for number, is_now in enumerate(at_once) if is_now])

        handler.on_log = keep
        try:
            yield
        finally:
            del handler.on_log  # the class's own again

    # --- with the state of the rank -----------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return what is kept back."""
        return {"step": self._step, "entries": [list(entry) for entry in self._entries]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._step, self._entries = saved["step"], [tuple(entry) for entry in saved["entries"]]

    # --- to the callbacks ---------------------------------------------------------------------------------------
    @property
    def _note(self) -> Path:
        return self._directory / f"transformers-{self._trainer.args.process_index}.json"

    def _hand_over(self, *, is_left: bool = False) -> None:
        state = self._trainer.state
        if not self._entries or self._handed_over == self._step:
            return
        done = self._calls_noted() if is_left else 0
        now = state.global_step, state.epoch
        calls = [(logs, step, epoch, number) for logs, step, epoch, numbers in self._entries for number in numbers]
        for count, (logs, state.global_step, state.epoch, number) in enumerate(calls, 1):  # as reporters read them
            if count > done:
                self._call(logs, [number])
                self._write_note(count)  # after each callback: a later one may take long, and die in it
        state.global_step, state.epoch = now
        self._handed_over = self._step

    def _calls_noted(self) -> int:
        """Return how many calls of callbacks the process that had this rank before has made for this step."""
        note = json.loads(self._note.read_text()) if self._note.exists() else {}
        return int(note["calls"]) if note.get("step") == self._step else 0

    def _write_note(self, calls: int) -> None:
        draft = self._note.with_suffix(".new")
        draft.write_text(json.dumps({"step": self._step, "calls": calls}))
        os.replace(draft, self._note)

    def _call(self, logs: dict[str, float], numbers: list[int]) -> Any:
        """Call `on_log` of some callbacks. Returns the control."""
        trainer, handler = self._trainer, self._trainer.callback_handler
        every = handler.callbacks
        handler.callbacks = [every[number] for number in numbers]
        try:
            return handler.call_event("on_log", trainer.args, trainer.state, trainer.control, logs=logs)
        finally:
            handler.callbacks = every
