"""One call of `trainer.fit()` as steps that are committed or repeated as a whole.

A step is one optimizer step with all its batches; with manual optimization, one batch. Everything that follows an
optimizer step (`on_train_batch_end`, validation, saving, logging, the end of an epoch) is done at the head of the next
step's block, on the same weights: there a failure repeats it. The run has one step more than optimizer steps for that.
What Lightning does inside `_FitLoop.run` and `_TrainingEpochLoop.run` is done here in the same order.
"""

import contextlib
import math
from collections import OrderedDict
from typing import Any

import torch
from lightning.pytorch.trainer import call
from torch.optim.lr_scheduler import ReduceLROnPlateau

import relight
from relight.errors import UsageError
from relight.integrations.lightning.data import NoFetcher, updates, updates_done
from relight.integrations.lightning.effects import Effects
from relight.integrations.lightning.refusals import refuse_data
from relight.integrations.lightning.state import Progress, RankProgress, is_lightnings, is_own
from relight.integrations.lightning.values import is_plain
from relight.integrations.lightning.waiting import WaitingGradients
from relight.integrations.trainers.held import HeldScheduler, modules_held
from relight.integrations.trainers.refused import lightning as refused

_ENDLESS = 2**40  # steps: neither epochs nor steps are limited
_LATE_HOOKS = (  # called in few steps: what they do to weights, no earlier step has shown
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_validation_model_eval", "on_validation_model_train"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_save_checkpoint", "on_train_end"),
)
_Pending = tuple[Any, Any, int]  # outputs of a batch, the batch, and its number in the epoch


def fit(strategy: Any, trainer: Any) -> None:
    """Do what `_FitLoop.run` does, in steps of relight."""
    loop = trainer.fit_loop
    loop.setup_data()
    if loop.skip:
        return
    refuse_data(trainer)
    if trainer.enable_validation:
        loop.epoch_loop.val_loop.setup_data()  # it calls collectives, once: a replacement would call them alone later
    loop.reset()
    loop.on_run_start()
    strategy.run = run = FitRun(strategy, trainer)
    try:
        train(run)
    finally:
        strategy.run = None
    loop._restarting = False


def train(run: "FitRun") -> None:
    """Take all steps of a run."""
    for step in run.training.steps(until=run.steps):
        if run.progress.is_over and not step.warmup:
            break  # also in a process that took a rank after the others had stopped
        with step as batches:
            run.take(step, batches)
        run.effects.end(committed=step.committed)
    run.effects.close()


class FitRun:
    """The steps of one run. `strategy` has prepared model and optimizers; `trainer` is at the start of its fit loop."""

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self._trainer = trainer
        self._strategy = strategy
        self._fit = fit_loop = trainer.fit_loop
        self._epoch = fit_loop.epoch_loop
        self._is_automatic = trainer.lightning_module.automatic_optimization
        accumulate = trainer.accumulate_grad_batches if self._is_automatic else 1
        self._per_epoch = math.ceil(fit_loop.max_batches / accumulate)
        first = updates_done(fit_loop, accumulate, self._per_epoch)
        self._syncs_first = getattr(strategy.model, "require_forward_param_sync", True)
        module = trainer.lightning_module
        module.forward = module.forward  # as it is once Lightning has called training_step through DDP
        self._closure: Any = None  # of the optimizer step under way
        self._pending: dict[int, _Pending] = {}  # of this step and the one before
        self._number = 0  # of the step under way
        self._carries_pending = has_own(trainer, "on_train_batch_end")
        self._may_write = has_own(trainer, *_LATE_HOOKS) or bool(_averages(trainer))
        self._fetcher = fit_loop._data_fetcher = NoFetcher(fit_loop._combined_loader)
        self.effects = Effects(strategy.job, trainer)
        data, self._reader = updates(fit_loop, accumulate, first)
        self.progress = Progress(trainer, first, getattr(data, "batch_sampler", data).begin_after)
        self._rank_progress = rank_progress = RankProgress(
            trainer, self.effects, lambda: self._number, self._carried_pending, self._take_pending, self._reader
        )
        optimizers = strategy.optimizers
        self._waiting = None if self._is_automatic else WaitingGradients(strategy.model, optimizers)
        self._schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
        schedulers = [HeldScheduler(each) if isinstance(each, ReduceLROnPlateau) else each for each in self._schedulers]
        averages = _averages(trainer)
        callbacks = {f"callback_{number}": each for number, each in enumerate(_own_callbacks(trainer))}
        saying = [each for each in _own_callbacks(trainer) if not is_lightnings(each, "state_dict")]
        held, own_averages = modules_held(callbacks, (strategy.model, *averages.values()), self._schedulers)
        self.training = relight.Training(
            model={"model": strategy.model, **held} if held else strategy.model,
            optimizer=_named("optimizer", optimizers),
            data=data,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            rng="preserve",
            per_rank={
                "trainer": rank_progress,
                **_named("callback", saying),
                **({"waiting_gradients": self._waiting} if self._waiting is not None else {}),
            },
            progress=self.progress,
            **_named("scheduler", schedulers),
            **averages,
            **own_averages,
        )

    @property
    def steps(self) -> int:
        """Steps of this run: those of the optimizer, and one for what follows the last.

        A standby counts from the first step of all until it learns where the others began.
        """
        loop, trainer = self._fit, self._trainer
        steps = _ENDLESS
        if loop.max_epochs is not None and loop.max_epochs >= 0:
            steps = loop.max_epochs * self._per_epoch - self.progress.first
        if self._is_automatic and trainer.max_steps >= 0:
            steps = min(steps, trainer.max_steps - trainer.global_step)
        return steps + 1

    # --- a step ---------------------------------------------------------------------------------------------------
    def take(self, step: relight.Step, item: Any) -> None:
        """Do one step: what follows the optimizer step before, then forward, backward and the write."""
        self._number = step.number
        self.effects.begin(step.number, rehearses=step.warmup)
        trainer = self._trainer
        trainer.training = True  # an attempt may have ended in a validation
        trainer.lightning_module._current_fx_name = None
        self._decide_on_buffers(step.number)
        if self._waiting is not None:
            self._waiting.begin()
        reader = self._reader
        batches = reader.read(item) if reader is not None else item  # after hooks that may change the dataset
        if step.warmup:
            for number, batch in enumerate(batches):
                self._compute(batch, number, quiet=True)
            return
        if step.attempt:
            _drop_validation(trainer)
        with reader.no_late_changes() if reader is not None else contextlib.nullcontext():
            if step.number == 0:
                self._lead_to_training()
            else:
                self._follow()
        for number, batch in enumerate(batches):
            if self.progress.is_over:
                break
            pending = self._compute(batch, self._epoch.batch_idx + 1)
            if number < len(batches) - 1:
                self._finish_batch(pending)
        if self.progress.is_over:
            self._fit.on_run_end()

    def _decide_on_buffers(self, number: int) -> None:
        """Have the first forward pass broadcast buffers if it does so under Lightning's own strategy.

        There the pass before decides, which Lightning makes without synchronization in manual optimization.
        """
        syncs = self._syncs_first if number == 0 else self._is_automatic
        self._strategy.model.require_forward_param_sync = syncs

    def _lead_to_training(self) -> None:
        """Begin the first epoch; of a resumed run, go on where its checkpoint was written."""
        epoch = self._epoch
        self._begin_epoch()
        if epoch.restarting and epoch._should_check_val_fx(self._fetcher):
            resumes_validation = epoch.val_loop.restarted_mid_evaluation
            if resumes_validation or epoch.restarted_on_last:
                epoch._skip_next_val = not resumes_validation
                self._end_advance()
                return
            epoch.val_loop.increment_progress_to_evaluation_end()

    def _follow(self) -> None:
        """Do what follows the optimizer step before this one."""
        number = self._number - 1
        before = self._scheduled()
        self._finish_batch(self._pending.get(number, ({}, None, self._epoch.batch_idx)))
        if self._scheduled() != before:
            raise refused.LATE_SCHEDULE.error(refused.BY)
        self._pending = {number: self._pending[number]} if number in self._pending else {}

    def _scheduled(self) -> list[int]:
        return [each.last_epoch for each in self._schedulers if not isinstance(each, ReduceLROnPlateau)]

    # --- a batch --------------------------------------------------------------------------------------------------
    def _compute(self, batch: Any, batch_idx: int, *, quiet: bool = False) -> _Pending:
        """The first half of `_TrainingEpochLoop.advance`: up to the write, and the learning rates that follow it."""
        trainer, epoch = self._trainer, self._epoch
        module = trainer.lightning_module
        if batch is None:
            raise UsageError("the training data gave None for a batch")
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        if self._carries_pending and not is_plain(batch):
            kind = type(batch).__qualname__
            raise refused.BATCH.error(refused.BY, f"a hook on_train_batch_end of this script is given a {kind}")
        if not quiet:
            epoch.val_loop.restarting = False
            self._fetcher.done = epoch.batch_progress.is_last_batch = batch_idx + 1 >= self._fit.max_batches
        epoch.batch_progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        if not quiet:
            call._call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
            if call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, batch_idx) == -1:
                raise refused.SKIPPED.error(refused.BY)
            call._call_strategy_hook(trainer, "on_train_batch_start", batch, batch_idx)
        epoch.batch_progress.increment_started()
        self._pending[self._number] = ({}, batch, batch_idx)
        outputs = self._optimize(batch, batch_idx)
        pending = self._pending[self._number] = (outputs, batch, batch_idx)
        epoch.batch_progress.increment_processed()
        epoch.update_lr_schedulers("step", update_plateau_schedulers=False)
        if epoch._num_ready_batches_reached():
            epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        return pending

    def _optimize(self, batch: Any, batch_idx: int) -> Any:
        """Forward, backward, and the write if one is due. Returns the outputs of the batch."""
        trainer, epoch = self._trainer, self._epoch
        kwargs = epoch._build_kwargs(OrderedDict(), batch, batch_idx)
        if self._waiting is not None:
            with self._waiting.batch():
                return epoch.manual_optimization.run(kwargs)
        automatic = epoch.automatic_optimization
        make = automatic._make_closure

        def make_closure(*args: Any, **kwargs: Any) -> Any:
            self._closure = make(*args, **kwargs)
            return self._closure

        automatic._make_closure = make_closure
        try:
            return automatic.run(trainer.optimizers[0], batch_idx, kwargs)
        finally:
            del automatic._make_closure
            self._closure = None

    def keep_outputs(self) -> None:
        """The closure of the optimizer step under way has been evaluated: its outputs are kept before the write."""
        result = self._closure and self._closure._result
        if result is not None and result.loss is not None:
            _, batch, batch_idx = self._pending[self._number]
            self._pending[self._number] = (result.asdict(), batch, batch_idx)

    def _finish_batch(self, pending: _Pending) -> None:
        """The second half of `_TrainingEpochLoop.advance`, and what follows it."""
        trainer, epoch = self._trainer, self._epoch
        outputs, batch, batch_idx = pending
        call._call_callback_hooks(trainer, "on_train_batch_end", outputs, batch, batch_idx)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", outputs, batch, batch_idx)
        trainer._logger_connector.on_batch_end()
        epoch.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()
        self._end_advance()

    def _end_advance(self) -> None:
        fit_loop, epoch = self._fit, self._epoch
        if self._may_write and (epoch._should_check_val_fx(self._fetcher) or epoch._num_ready_batches_reached()):
            self._rank_progress.expect_writes()
        epoch.on_advance_end(self._fetcher)
        epoch.on_iteration_done()
        if not epoch.done:
            return
        fit_loop.on_advance_end()
        fit_loop.on_iteration_done()
        self.progress.is_over = fit_loop.done
        if not self.progress.is_over:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._fit.on_advance_start()
        self._epoch.reset()
        self._epoch.on_run_start(self._fetcher)

    # --- what the next step's hooks are given -----------------------------------------------------------------------
    def _carried_pending(self) -> Any:
        pending = self._pending.get(self._number) if self._carries_pending else None
        if pending is None:
            return None
        if not is_plain(pending[0]):
            kind = type(pending[0]).__qualname__
            raise refused.BATCH.error(refused.BY, f"a hook on_train_batch_end is given a {kind} of training_step")
        return [self._number, *pending]

    def _take_pending(self, kept: Any) -> None:
        if kept is not None:
            self._number, *pending = kept
            self._pending = {self._number: tuple(pending)}
        elif self._carries_pending:
            self._pending = {}  # the first step is undone


def _named(name: str, things: list[Any]) -> dict[str, Any]:
    if len(things) == 1:
        return {name: things[0]}
    return {f"{name}_{number}": thing for number, thing in enumerate(things)}


def _averages(trainer: Any) -> dict[str, Any]:
    """Return the averaged models of callbacks (WeightAveraging)."""
    found = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]
    return _named("ema", [each for each in found if isinstance(each, torch.optim.swa_utils.AveragedModel)])


def has_own(trainer: Any, *hooks: str) -> bool:
    """Return whether the module or a callback has one of these hooks from the script itself."""
    things = (trainer.lightning_module, *trainer.callbacks)
    return any(hasattr(each, hook) and not is_lightnings(each, hook) for each in things for hook in hooks)


def _own_callbacks(trainer: Any) -> list[Any]:
    """Return the callbacks of classes that are not Lightning's."""
    return [each for each in trainer.callbacks if is_own(each)]


def _drop_validation(trainer: Any) -> None:
    """Forget what an interrupted validation has logged; metrics of the module are undone with the step."""
    results = trainer.fit_loop.epoch_loop.val_loop._results
    results.reset(metrics=False)
    for metric in results.values():
        metric.has_reset = True
