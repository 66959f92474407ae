"""The state of a Lightning Trainer beside its model and optimizers, as objects with `state_dict`.

`Progress` holds the same on every rank: the counters of the loops. `RankProgress` differs between ranks: values that
were logged and not yet reduced, what hooks of the next step are given, and the state of callbacks.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from relight.integrations.lightning import callbacks
from relight.integrations.lightning.effects import Effects
from relight.integrations.lightning.values import compact, copied, expand, has_tensors, is_plain, moved
from relight.integrations.trainers.own_names import MadeIn, Show, names_in
from relight.integrations.trainers.refused import lightning as refused
from relight.integrations.trainers.updates import Reader

_COUNTS = (bool, int, float, str)
_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_FIRST_STEPS = 3
_OF_STEPS = ("on_", "training_step", "validation_step", "optimizer_step", "backward", "configure_gradient_clipping")
_BESIDE_STEPS = (
    *("on_fit_", "on_train_start", "on_train_end", "on_exception", "on_load_checkpoint"),
    *("on_sanity_check_", "on_test_", "on_predict_", "on_gpu"),
)
_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class Progress:
    """Counters and flags of the loops, and the names under which rank 0 logs."""

    def __init__(self, trainer: Any, first: int, begin_after: Callable[[int], None]) -> None:
        """`first`: optimizer steps before this run. `begin_after` tells the data, if other ranks had another number."""
        self._trainer = trainer
        self._begin_after = begin_after
        self.first = first
        self.is_over = False  # training stops here, on every rank
        own = [logger.version if "_version" in vars(logger) else None for logger in trainer.loggers]
        self._name_loggers(trainer.strategy.broadcast(own))  # each chooses by what lies in its directory

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        loops = {path: _loop_state(loop) for path, loop in _loops("fit", self._trainer.fit_loop)}
        return compact({"loops": loops, "versions": self._versions, "first": self.first, "is_over": self.is_over})

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, also on another rank."""
        saved = expand(saved)
        for path, loop in _loops("fit", self._trainer.fit_loop):
            _load_loop(loop, saved["loops"][path])
        self._name_loggers(saved["versions"])
        self.first = saved["first"]
        self._begin_after(self.first)
        self.is_over = saved["is_over"]

    def _name_loggers(self, versions: list[Any]) -> None:
        self._versions = versions
        for logger, version in zip(self._trainer.loggers, versions, strict=True):
            if version is not None:
                vars(logger)["_version"] = version


def _loops(path: str, loop: _Loop) -> Iterator[tuple[str, _Loop]]:
    yield path, loop
    for name, inner in vars(loop).items():
        if isinstance(inner, _Loop):
            yield from _loops(f"{path}.{name}", inner)


def _loop_state(loop: _Loop) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in vars(loop).items():
        if isinstance(value, _BaseProgress):
            state[name] = _counts(value)
        elif type(value) in _COUNTS:
            state[name] = value
        elif name == "_seen_batches_per_dataloader":
            state[name] = list(map(list, value.items()))
    return state


def _counts(progress: _BaseProgress) -> dict[str, Any]:
    """Return what its `state_dict` does, in a fraction of the time."""
    return {
        name: _counts(value) if isinstance(value, _BaseProgress) else value for name, value in vars(progress).items()
    }


def _load_loop(loop: _Loop, state: dict[str, Any]) -> None:
    for name, value in state.items():
        mine = vars(loop).get(name)
        if isinstance(mine, _BaseProgress):
            mine.load_state_dict(value)
        elif isinstance(mine, dict):
            mine.clear()
            mine.update(value)
        else:
            vars(loop)[name] = value


class RankProgress:
    """Logged values, callbacks, what `on_train_batch_end` is given next, and what is kept back from loggers and disk.

    Args:
        trainer: the Trainer.
        effects: of the step under way.
        step: returns the number of the step under way.
        pending: returns outputs and batch of the newest step, if hooks of the script's own are given them.
        take_pending: takes over what `pending` returned.
        reader: of the training data; None: hooks cannot change it.
    """

    def __init__(
        self,
        trainer: Any,
        effects: Effects,
        step: Callable[[], int],
        pending: Callable[[], Any],
        take_pending: Callable[[Any], None],
        reader: Reader | None,
    ) -> None:
        self._trainer = trainer
        self._effects = effects
        self._step = step
        self._late = ""  # a module that a callback has made in a step
        self._left: list[set[str]] = [set() for _ in trainer.callbacks]  # attributes that hold such modules
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet(trainer.lightning_module.modules())
        self._names = {name for name, _ in trainer.lightning_module.named_modules()}
        for callback in trainer.callbacks:
            self._known.update(module for _, module in callbacks.modules_of(callback))
        self._pending = pending
        self._take_pending = take_pending
        self._data = {"datamodule": trainer.datamodule}
        if reader is not None:
            self._data |= {"train_dataset": reader.shown, "collate_fn": reader.collate}

    def join_training(self, show: Show, expect_writes: Callable[[], None], made_in: MadeIn) -> None:
        """Leave to relight what callbacks of the script's own classes hold, but for modules that their state_dict says.

        Keep it from what this object keeps, where the Trainer is of a class of the script's own. `expect_writes`
        announces code that may exchange weights, and runs in few steps.
        """
        self.expect_writes = expect_writes
        librarys = names_in(type(self._trainer), ("lightning.",))
        librarys.add("_last_val_time")  # set by a loop: a time of this process
        for name, thing in self._data.items():
            # A data module's hyperparameters are Lightning's, and made when they are asked for.
            hidden = frozenset(each for each in names_in(type(thing), ("lightning.",)) if each.startswith("_"))
            show(name, thing, functools.partial(_is_among, hidden))
        for number, logger in enumerate(self._trainer.loggers):
            hidden = frozenset({*names_in(type(logger), ("lightning.",)), "log_metrics", "save"})  # as Effects has it
            show(f"loggers[{number}]", logger, functools.partial(_is_among, hidden))
        show("trainer", self._trainer, lambda name, _value: name in librarys)
        for number, callback in enumerate(self._trainer.callbacks):
            if is_own(callback):
                keeps = functools.partial(_is_kept_here, callback)
                show(f"callbacks[{number}]", callback, keeps, of_library=True)
            for name, value in vars(callback).items() if not is_own(callback) else ():
                if callable(value):  # of a LambdaCallback
                    show(f"callbacks[{number}].{name}", value, lambda _name, _value: False)
        if made := made_in(*_hooks_of(self._trainer)):
            raise refused.LATE_LAYER.error(refused.BY, made)

    def state_dict(self) -> dict[str, Any]:
        """Return copies. Raises UsageError: one of the first steps has made a module."""
        self._look_for_late_modules()
        if self._step() < _FIRST_STEPS:
            self._refuse_late_layers()
        trainer = self._trainer
        connector = trainer._logger_connector
        tree = {
            "results": _results_state(trainer.fit_loop.epoch_loop._results),
            "logged": {name: copied(getattr(connector, name)) for name in _LOGGED},
            "place": [connector._first_loop_iter, connector._current_fx],
            "should_stop": trainer.should_stop,
            "callbacks": list(map(callbacks.state_of, trainer.callbacks, self._left)),
            "late": self._late,
            "effects": self._effects.state_dict(),
            "pending": copied(self._pending()),
        }
        return compact(tree)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        saved = expand(saved)
        trainer = self._trainer
        connector = trainer._logger_connector
        device = trainer.strategy.root_device
        _load_results(trainer, saved["results"], device)
        for name in _LOGGED:
            setattr(connector, name, moved(saved["logged"][name], device))
        connector._first_loop_iter, connector._current_fx = saved["place"]
        trainer.should_stop = saved["should_stop"]
        for callback, state in zip(trainer.callbacks, saved["callbacks"], strict=True):
            callbacks.load(callback, state)
        self._late = saved["late"]
        self._effects.load_state_dict(saved["effects"])
        self._take_pending(moved(saved["pending"], device))

    def standing_risk(self) -> str:
        """Return the reason why any recovery makes the bits doubtful; empty: none does."""
        return self._late

    def _refuse_late_layers(self) -> None:
        """Refuse layers that code of libraries has made in a step, as torchmetrics' MetricTracker does."""
        for name, module in self._trainer.lightning_module.named_modules():
            is_a_part = has_tensors(module.state_dict()) or not type(module).__module__.startswith("torch.")
            if name not in self._names and is_a_part:
                kind = type(module).__qualname__
                raise refused.LATE_LAYER.error(refused.BY, f"a step has made {name}, a {kind}")

    def _look_for_late_modules(self) -> None:
        for number, callback in enumerate(self._trainer.callbacks):
            for way, module in callbacks.modules_of(callback, self._known) if is_own(callback) else ():
                if callbacks.says_itself(callback, str(way[0]), module) and has_tensors(callback.state_dict()):
                    continue
                self._known.update(self._trainer.lightning_module.modules())  # it may be a new part of the model
                if any(each in self._known for each in module.modules()):
                    continue
                self._known.update(module.modules())
                place = f"{type(callback).__qualname__}.{'.'.join(map(str, way))}"
                error = refused.LATE_MODULE.error(refused.BY, f"a step has made the module of callback {place}")
                if self._step() < _FIRST_STEPS:
                    raise error
                self._left[number].add(str(way[0]))
                if not self._late:
                    self._late = str(error)
                    rank_zero_warn(f"{error}. Otherwise the bits are not vouched for after a failure")


def _hooks_of(trainer: Any) -> tuple[list[MethodType], dict[str, Any]]:
    """Return the methods of the module and of callbacks that steps call, and what Lightning gives to them."""
    module = trainer.lightning_module
    names = [name for name in dir(module) if name.startswith(_OF_STEPS) and not name.startswith(_BESIDE_STEPS)]
    hooks = [getattr(each, name, None) for each in (module, *trainer.callbacks) for name in names]
    return [each for each in hooks if isinstance(each, MethodType)], {"pl_module": module, "trainer": trainer}


def _is_kept_here(callback: Callback, name: str, value: Any) -> bool:
    if isinstance(value, torch.nn.Module) and next(value.parameters(), None) is not None:
        return True  # handed over, or late
    return is_plain(value) or callbacks.says_itself(callback, name, value)


def _is_among(names: frozenset[str], name: str, _value: Any) -> bool:
    return name in names


# --- values that were logged --------------------------------------------------------------------------------------
def _results_state(results: Any) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "meta": {name: getattr(metric.meta, name) for name in _META},
            "reduce": metric.meta.reduce_fx.__name__,
            "sync": [metric.meta.sync.should, metric.meta.sync.op, metric.meta.sync.rank_zero_only],
            "is_tensor": metric.is_tensor,
            "has_reset": metric.has_reset,
            "updates": metric._update_count,
            "values": {
                name: copied(vars(metric).get(name))
                for name in ("_forward_cache", "_computed", *(("value", "cumulated_batch_size") * metric.is_tensor))
            },
        }
        for key, metric in results.items()
    ]


def _load_results(trainer: Any, saved: list[dict[str, Any]], device: torch.device) -> None:
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    for entry in saved:
        should, op, on_rank_zero = entry["sync"]
        meta = _Metadata(**entry["meta"], reduce_fx=getattr(torch, entry["reduce"]))
        meta.sync = _Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=on_rank_zero, _op=op)
        metric = results[entry["key"]] = _ResultMetric(meta, entry["is_tensor"])
        if not entry["is_tensor"]:
            metric.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        for name, value in entry["values"].items():
            if value is not None or name in vars(metric):
                setattr(metric, name, moved(value, device))
        metric.has_reset, metric._update_count = entry["has_reset"], entry["updates"]


# --- classes of the script's own, or Lightning's -------------------------------------------------------------------
def is_own(callback: Callback) -> bool:
    """Return whether a callback is of a class that is not Lightning's."""
    return not type(callback).__module__.startswith("lightning.")


def is_lightnings(thing: Any, method: str) -> bool:
    """Return whether a method of an object is Lightning's own."""
    module: str = getattr(type(thing), method).__module__
    return module.startswith("lightning.")
