"""The state of a transformers Trainer beside its model and optimizer, as objects with `state_dict`.

`Progress` holds the same on every rank: counters and control flags. `RankProgress` differs between ranks: the loss
since the last log, the history of logs, and attributes of the Trainer, of a subclass too, and of callbacks.
"""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from relight.integrations.trainers.own_names import MadeIn, Show, names_in
from relight.integrations.trainers.refused import transformers as refused
from relight.integrations.transformers.logs import Logs
from relight.integrations.transformers.settings import Settings
from relight.integrations.transformers.values import copied, is_plain, like, names_of
from relight.script_files import is_script_file

_OF_RANK = {"is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "log_history"}
_REPORTERS = (PrinterCallback, ProgressCallback, *INTEGRATION_TO_CALLBACK.values())
_LIBRARIES = ("transformers.", "trl.")
_CALLED = ("data_collator", "compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics")
_BESIDE_STEPS = ("on_init_end", "on_train_begin", "on_train_end", "on_predict")


class Progress:
    """TrainerState, TrainerControl and the Trainer's own counters."""

    def __init__(self, trainer: Any, places: Any) -> None:
        """`places`: the sampler of the data; `begin_after(first)` is called on it if the run began at another step."""
        self._trainer = trainer
        self._places = places
        self.first = int(trainer.state.global_step)  # optimizer steps before this run
        self.grad_norm: float | None = None  # of the newest step
        self.learning_rate: float | None = None  # of the newest step, before its scheduler moved on
        self.is_over = False  # training stops here, on every rank

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        trainer, state = self._trainer, self._trainer.state
        return {
            "state": {name: getattr(state, name) for name in names_of(TrainerState) if name not in _OF_RANK},
            "control": {name: getattr(trainer.control, name) for name in names_of(TrainerControl)},
            "first": [self.first, trainer._initial_num_input_tokens_seen],
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
        self.first, trainer._initial_num_input_tokens_seen = saved["first"]
        trainer._initial_global_step = self.first
        self._places.begin_after(0 if trainer.args.ignore_data_skip else self.first)
        trainer._globalstep_last_logged, trainer._total_loss_scalar = saved["last_logged"], saved["total_loss"]
        self.grad_norm, self.learning_rate = saved["grad_norm"], saved["learning_rate"]
        self.is_over = saved["is_over"]


class RankProgress:
    """The loss since the last log, the history of logs, and plain attributes of the Trainer and of its callbacks."""

    def __init__(self, trainer: Any, logs: Logs, dataset: Any) -> None:
        self._trainer = trainer
        self._dataset = dataset
        self._logs = logs
        self._settings = Settings(trainer)
        self._left: set[int] = set()  # objects of the script's own classes, by `id`
        self._librarys = names_in(type(trainer), _LIBRARIES)

    def join_training(self, show: Show, expect_writes: Callable[[], None], made_in: MadeIn) -> None:
        """Leave to relight what objects of the script's own classes hold, but for the Trainer's own attributes.

        `expect_writes` announces code that may exchange weights, and runs in few steps.
        """
        self.expect_writes = expect_writes
        trainer = self._trainer
        for number, callback in enumerate(trainer.callback_handler.callbacks):
            name = f"callbacks[{number}]"
            if isinstance(callback, _REPORTERS):
                continue
            if show(name, callback, lambda _name, _value: False):
                self._left.add(id(callback))
            elif not type(callback).__module__.startswith(_LIBRARIES):
                show(name, callback, lambda _name, value: is_plain(value), of_library=True)
        show("train_dataset", self._dataset, lambda _name, _value: False)  # callbacks may tell it the epoch
        for name in _CALLED:
            show(name, getattr(trainer, name, None), lambda _name, _value: False)
        if show("trainer", trainer, self._keeps):
            self._left.add(id(trainer))
        if made := made_in(*_hooks_of(trainer)):
            raise refused.LATE_LAYER.error(refused.BY, made)

    def _keeps(self, name: str, value: Any) -> bool:
        return name in self._librarys and (is_plain(value) or _is_librarys(value))

    def state_dict(self) -> dict[str, Any]:
        """Return copies."""
        trainer = self._trainer
        return {
            "loss": trainer._tr_loss.clone(),
            "logs": self._logs.state_dict(),
            "history": [dict(entry) for entry in trainer.state.log_history],
            "settings": self._settings.state_dict(),
            "attributes": self._attributes(trainer),
            "callbacks": [self._attributes(each) for each in trainer.callback_handler.callbacks],
        }

    def _attributes(self, thing: Any) -> dict[str, Any]:
        """Attributes that are numbers, strings, tensors, lists and dicts of these; none of callbacks that report."""
        if isinstance(thing, _REPORTERS) or (id(thing) in self._left and thing is not self._trainer):
            return {}
        librarys = self._librarys if id(thing) in self._left else vars(thing)
        return {name: copied(value) for name, value in vars(thing).items() if name in librarys and is_plain(value)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        trainer = self._trainer
        trainer._tr_loss = saved["loss"].clone()
        self._logs.load_state_dict(saved["logs"])
        trainer.state.log_history = [dict(entry) for entry in saved["history"]]
        self._settings.load_state_dict(saved["settings"])
        for name, value in saved["attributes"].items():
            setattr(trainer, name, like(vars(trainer).get(name), value))
        for callback, attributes in zip(trainer.callback_handler.callbacks, saved["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, like(vars(callback).get(name), value))


def _hooks_of(trainer: Any) -> tuple[list[MethodType], dict[str, Any]]:
    """Return the methods that steps call, and what the Trainer gives to them."""
    names = [name for name in dir(TrainerCallback) if name.startswith("on_") and name not in _BESIDE_STEPS]
    hooks = [getattr(callback, name) for callback in trainer.callback_handler.callbacks for name in names]
    own = [getattr(trainer, name) for name in ("training_step", "compute_loss", "get_batch_samples", "log")]
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return [*own, *hooks], {"model": trainer.model, "args": trainer.args, "optimizer": optimizer}


def _is_librarys(value: Any) -> bool:
    """Return whether a value is a function of a library, or one with some arguments, which the library makes anew."""
    code = getattr(value.func if isinstance(value, functools.partial) else value, "__code__", None)
    return code is not None and not is_script_file(code.co_filename)
