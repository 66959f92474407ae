"""One call of `Trainer.train()` as steps that are committed or repeated as a whole.

Everything that follows an optimizer step (callbacks, evaluation, saving, the collective of logging) is done at the head
of the next step's block, on the same weights: there a failure repeats it. The run has one step more than optimizer
steps for that, which does only this. Loggers are called after a step is committed, so they see each log once.
"""

import contextlib
import functools
from typing import Any

import torch
import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers.optimization import GreedyLR

import relight
from relight.integrations.accelerate import follow_rank
from relight.integrations.trainers.held import HeldScheduler, modules_held
from relight.integrations.trainers.refused import transformers as refused
from relight.integrations.trainers.updates import Reader
from relight.integrations.transformers.logs import Logs
from relight.integrations.transformers.state import Progress, RankProgress


class TrainerRun:
    """The steps of one run.

    Args:
        trainer: the Trainer, whose model and optimizer are prepared.
        model: the wrapped module.
        updates: a DataLoader of lists of micro-batches, one list for each optimizer step.
        reader: of the same data.
        schedule: optimizer steps of an epoch, micro-batches of an epoch, and optimizer steps in all.
        ignore_keys: as `Trainer.train(ignore_keys_for_eval=...)`.
        job: that this process is in.
    """

    def __init__(
        self,
        trainer: Any,
        model: torch.nn.Module,
        updates: DataLoader[Any],
        reader: Reader,
        schedule: tuple[int, int, int],
        ignore_keys: Any,
        job: relight.Job,
    ) -> None:
        self._trainer = trainer
        self._model = model
        self._updates_per_epoch, self._batches_per_epoch, self._max_steps = schedule
        self._ignore_keys = ignore_keys
        self._reader = reader
        self.logs = Logs(trainer, job)
        self.progress = Progress(trainer, updates.batch_sampler)
        scaler = getattr(trainer.accelerator, "scaler", None)
        self._rank_progress = RankProgress(trainer, self.logs, reader.shown)
        scheduler = trainer.lr_scheduler
        schedulers = (scheduler, getattr(scheduler, "scheduler", None))  # accelerate's, around another
        held, averages = modules_held(_holders_of(trainer), (model, trainer.model), schedulers)
        self._follows_metric = isinstance(scheduler, (ReduceLROnPlateau, GreedyLR))
        self.training = relight.Training(
            model={"model": model, **held} if held else model,
            optimizer=_optimizers_of(trainer),
            scheduler=HeldScheduler(scheduler) if self._follows_metric else scheduler,
            scaler=scaler,
            data=reader.places(updates),
            seed=trainer.args.seed,
            progress=self.progress,
            per_rank={"trainer": self._rank_progress},
            **averages,
        )

    @property
    def steps(self) -> int:
        """Steps of this run: those of the optimizer, and one for what follows the last.

        A standby counts from the first step of all until it learns where the others began.
        """
        return self._max_steps - self.progress.first + 1

    def take(self, step: relight.Step, item: Any) -> None:
        """Do one step: what follows the optimizer step before, then forward, backward and the write."""
        trainer = self._trainer
        self.follow_rank()
        if not step.warmup:
            self.logs.begin(step.number)
        number = self.progress.first + step.number
        transformers.set_seed(_seed_of(trainer.args.seed, number))
        if not step.warmup:
            with self._reader.no_late_changes():
                self._follow(step, number)
        if self.progress.is_over or number == self._max_steps:
            self.progress.is_over = True
            trainer.store_flos()  # a collective, so not left to the code after the loop
            return
        micro_batches = list(self._reader.read(item))  # after callbacks that change the dataset at the head of an epoch
        if not step.warmup:
            self._call("on_step_begin")
        self._update(micro_batches, quiet=step.warmup)
        if not step.warmup:
            trainer.state.global_step = number + 1
            trainer.state.epoch = self._epoch_after(number)

    def follow_rank(self) -> None:
        """Have the Trainer know the rank that this process has now."""
        trainer = self._trainer
        follow_rank()
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()

    def _epoch_after(self, number: int) -> float:
        """The epoch that the Trainer shows after an optimizer step: it counts micro-batches."""
        epoch, update = divmod(number, self._updates_per_epoch)
        batches = min((update + 1) * self._trainer.args.gradient_accumulation_steps, self._batches_per_epoch)
        return float(epoch + batches / self._batches_per_epoch)

    # --- what follows an optimizer step ---------------------------------------------------------------------------
    def _follow(self, step: relight.Step, number: int) -> None:
        trainer = self._trainer
        if step.number == 0:
            self._rank_progress.expect_writes()
            if trainer.args.eval_on_start:
                trainer._evaluate(None, self._ignore_keys, skip_scheduler=True)
            self._call("on_epoch_begin")
            return
        self._call("on_step_end")
        is_epoch_over = number % self._updates_per_epoch == 0 or number == self._max_steps
        if is_epoch_over or trainer.control.should_evaluate or trainer.control.should_save:
            self._rank_progress.expect_writes()  # averages that are exchanged for weights in an evaluation, say
        self._log_save_evaluate(number)
        if trainer.control.should_epoch_stop and not trainer.control.should_training_stop:
            raise refused.EPOCH_STOP.error(refused.BY)
        if is_epoch_over or trainer.control.should_training_stop:
            self._call("on_epoch_end")
            self._log_save_evaluate(number)
            self.progress.is_over = trainer.control.should_training_stop
            if not self.progress.is_over and number < self._max_steps:
                self._call("on_epoch_begin")

    def _log_save_evaluate(self, number: int) -> None:
        trainer, progress = self._trainer, self.progress
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            progress.grad_norm,
            self._model,
            None,
            (number - 1) // self._updates_per_epoch,
            self._ignore_keys,
            None,
            learning_rate=progress.learning_rate,
        )

    def _call(self, event: str) -> None:
        trainer = self._trainer
        handler = getattr(trainer.callback_handler, event)
        trainer.control = handler(trainer.args, trainer.state, trainer.control)

    # --- forward, backward, write ---------------------------------------------------------------------------------
    def _update(self, micro_batches: list[Any], *, quiet: bool) -> None:
        trainer, model = self._trainer, self._model
        micro_batches, items = trainer.get_batch_samples(iter(micro_batches), len(micro_batches), trainer.args.device)
        trainer.current_gradient_accumulation_steps = len(micro_batches)
        model.zero_grad()
        syncs_each = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        for number, inputs in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            trainer.accelerator.gradient_state._set_sync_gradients(is_last)
            skip_sync = functools.partial(trainer.accelerator.no_sync, model=model)
            with contextlib.nullcontext() if is_last or syncs_each else skip_sync():
                self._add_loss(trainer.training_step(model, inputs, items))
            trainer.current_flos += float(trainer.floating_point_ops(inputs))
            trainer._track_num_input_tokens(inputs)
            if not is_last and not quiet:
                self._call("on_substep_end")
        norm = trainer._clip_grad_norm(model) if trainer.args.max_grad_norm > 0 else None
        norm = trainer._get_grad_norm(model, grad_norm=norm)
        self.progress.grad_norm = float(norm) if norm is not None else None
        if not quiet:
            self._call("on_pre_optimizer_step")
        trainer.optimizer.step()
        if not quiet:
            self._call("on_optimizer_step")
        self.progress.learning_rate = trainer._get_learning_rate()
        if not trainer.accelerator.optimizer_step_was_skipped and not self._follows_metric:
            trainer.lr_scheduler.step()
        model.zero_grad()

    def _add_loss(self, loss: torch.Tensor) -> None:
        trainer = self._trainer
        if trainer.args.logging_nan_inf_filter and not bool(torch.isfinite(loss)):
            steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            trainer._tr_loss = trainer._tr_loss + trainer._tr_loss / steps
        else:
            trainer._tr_loss = trainer._tr_loss + loss


def _holders_of(trainer: Any) -> dict[str, Any]:
    """The Trainer and its callbacks, of which a script's own may hold modules: a teacher, an average."""
    callbacks = trainer.callback_handler.callbacks
    return {"trainer": trainer, **{f"callback_{number}": each for number, each in enumerate(callbacks)}}


def _optimizers_of(trainer: Any) -> dict[str, Any]:
    """The Trainer's optimizer, and others that a subclass keeps as attributes: for a discriminator, say."""
    kept = {name: thing for name, thing in vars(trainer).items() if isinstance(thing, torch.optim.Optimizer)}
    bare = {
        name: getattr(thing, "optimizer", thing) for name, thing in {"optimizer": trainer.optimizer, **kept}.items()
    }
    return {name: thing for name, thing in bare.items() if name == "optimizer" or thing is not bare["optimizer"]}


def _seed_of(seed: int, step: int) -> int:
    """The seed of one step's draws, by the number of the optimizer step, also in a resumed run.

    As with the Trainer alone, ranks draw alike: noise on gradients, or a choice at random, is the same on all.
    """
    return (seed * 1_000_003 + step * 10_007) % 2**31
