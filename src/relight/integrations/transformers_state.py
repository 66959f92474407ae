"""The state of a transformers Trainer beside its model and optimizer, as objects with `state_dict`.

`Progress` holds the same on every rank: counters, control flags, the history of logs. `RankProgress` differs between
ranks: the loss since the last log, and attributes of the Trainer, of a subclass too, and of callbacks.
"""

import copy
from dataclasses import fields
from typing import Any

import torch
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerControl, TrainerState

_OF_RANK = {"is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "log_history"}
# What `speed_metrics` adds to evaluation results; each rank measures its own.
_MEASURED = ("_runtime", "_per_second")
_REPORTERS = (PrinterCallback, ProgressCallback, *INTEGRATION_TO_CALLBACK.values())
_PLAIN = (bool, int, float, str, type(None))


class Progress:
    """TrainerState, TrainerControl and the Trainer's own counters."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._measured: dict[int, dict[str, Any]] = {}  # by position in the history; never undone
        self.grad_norm: float | None = None  # of the newest step
        self.learning_rate: float | None = None  # of the newest step, before its scheduler moved on
        self.is_over = False  # training stops here, on every rank

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        trainer, state = self._trainer, self._trainer.state
        return {
            "state": {
                each.name: getattr(state, each.name) for each in fields(TrainerState) if each.name not in _OF_RANK
            },
            "history": [self._common(number, entry) for number, entry in enumerate(state.log_history)],
            "control": {name: getattr(trainer.control, name) for name in _names(TrainerControl)},
            "last_logged": trainer._globalstep_last_logged,
            "total_loss": trainer._total_loss_scalar,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "is_over": self.is_over,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, also on another rank."""
        trainer = self._trainer
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        for name, value in saved["control"].items():
            setattr(trainer.control, name, value)
        measured = self._measured
        trainer.state.log_history = [{**entry, **measured.get(n, {})} for n, entry in enumerate(saved["history"])]
        trainer._globalstep_last_logged, trainer._total_loss_scalar = saved["last_logged"], saved["total_loss"]
        self.grad_norm, self.learning_rate = saved["grad_norm"], saved["learning_rate"]
        self.is_over = saved["is_over"]

    def _common(self, number: int, entry: dict[str, Any]) -> dict[str, Any]:
        """The part of a log entry that is equal on all ranks."""
        own = {name: value for name, value in entry.items() if name.endswith(_MEASURED)}
        if not own:
            return dict(entry)
        self._measured[number] = own
        return {name: value for name, value in entry.items() if name not in own}


class RankProgress:
    """The loss since the last log, and plain attributes of the Trainer and of its callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return copies."""
        trainer = self._trainer
        return {
            "loss": trainer._tr_loss.clone(),
            "attributes": _plain_attributes(trainer),
            "callbacks": [_plain_attributes(each) for each in trainer.callback_handler.callbacks],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        trainer = self._trainer
        trainer._tr_loss = saved["loss"].clone()
        for name, value in saved["attributes"].items():
            setattr(trainer, name, _like(vars(trainer).get(name), value))
        for callback, attributes in zip(trainer.callback_handler.callbacks, saved["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, _like(vars(callback).get(name), value))


def _names(kind: Any) -> list[str]:
    return [each.name for each in fields(kind)]


def _plain_attributes(callback: Any) -> dict[str, Any]:
    """Attributes that are numbers, strings, tensors, and lists and dicts of these; none of callbacks that report."""
    if isinstance(callback, _REPORTERS):
        return {}
    return {name: _copied(value) for name, value in vars(callback).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, torch.Tensor):
        return value.is_leaf and not value.requires_grad
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return type(value) is list and all(map(_is_plain, value))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _like(present: Any, value: Any) -> Any:
    """A copy of a saved value, whose dicts are of the kind that this process has: a defaultdict stays one."""
    if not isinstance(value, dict):
        return _copied(value)
    copied: dict[str, Any] = {}
    if isinstance(present, dict):
        copied = copy.copy(present)
        copied.clear()
    for key, each in value.items():
        copied[key] = _like(present.get(key) if isinstance(present, dict) else None, each)
    return copied
