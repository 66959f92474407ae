"""The subclasses of Hugging Face's `Trainer`, and what they refuse."""

import contextlib
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.trainer_utils import TrainOutput
from transformers.training_args import TrainingArguments

import relight
from relight.integrations.accelerate import refuse_unfit
from relight.integrations.trainers.refused import transformers as refused
from relight.integrations.trainers.refused import trl
from relight.integrations.trainers.refused.table import refuse
from relight.integrations.trainers.second import comes_again
from relight.integrations.trainers.updates import Reader, grouped_loader
from relight.integrations.transformers.run import TrainerRun
from relight.script_files import adopt_caller

__all__ = ["RelightMixin", "Seq2SeqTrainer", "Trainer", "TrainingArguments"]

IS_WORKER = "RELIGHT_PRIVATE_DIR" in os.environ
if IS_WORKER and dist.is_initialized():
    raise refused.INITIALIZED.error(refused.BY)
_job = relight.init() if IS_WORKER else None
_KNOWN_OF_TRL = {("trainer", name) for name in ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")}
_CHANGES_A_MODEL = {"BEMACallback", "SyncRefModelCallback"}  # of TRL


class RelightMixin:
    """The training loop of a `transformers.Trainer` in steps of relight."""

    _run: TrainerRun | None = None
    _has_trained = False  # in this process

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train, from a checkpoint if one is given. A standby gets all of it from other ranks instead.

        It may be started when the directory has another newest checkpoint, or one that is only half written.
        """
        if IS_WORKER:
            adopt_caller(sys._getframe(1))
            refuse_unsupported(self, trial)
            self._refuse_second()
        inner: Any = super()
        checkpoint = None if _job is not None and _job.is_standby else resume_from_checkpoint
        output: TrainOutput = inner.train(checkpoint, trial, *args, **kwargs)
        return output

    def _refuse_second(self) -> None:
        """Raise UsageError if the script has trained in this process, or will do so again, as its code shows."""
        where = "it has trained before" if RelightMixin._has_trained else comes_again("train", transformers.Trainer)
        if where is not None:
            raise refused.SECOND.error(refused.BY, f"{refused.SECOND.setting} ({where})")
        RelightMixin._has_trained = True

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        if not IS_WORKER:
            inner: Any = super()
            return inner._inner_training_loop(batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval)
        started = time.time()
        run, samples = self._begin_run(resume_from_checkpoint, ignore_keys_for_eval)
        train(run)
        self._run = None
        trainer: Any = self
        return trainer._finalize_training(trial, samples, started)

    def _begin_run(self, checkpoint: str | None, ignore_keys: Any) -> tuple[TrainerRun, float]:
        """Prepare model, optimizer and data as the Trainer does. Returns the run and the samples of its schedule."""
        trainer: Any = self
        args = trainer.args
        trainer.accelerator.free_memory()
        loader = trainer.get_train_dataloader()
        epochs, updates_per_epoch, _, samples, _, batches, max_steps = trainer.set_initial_training_values(args, loader)
        trainer._init_training_state(max_steps, updates_per_epoch, epochs, checkpoint, None)
        model, loader = trainer._prepare_for_training(max_steps, loader, checkpoint)
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer._initial_global_step = trainer.state.global_step
        trainer._tr_loss = torch.tensor(0.0, device=args.device)
        trainer._total_loss_scalar = 0.0
        trainer._globalstep_last_logged = trainer.state.global_step
        model.zero_grad()
        handler = trainer.callback_handler
        trainer.control = handler.on_train_begin(args, trainer.state, trainer.control)
        first = 0 if args.ignore_data_skip else trainer.state.global_step
        refuse_unfit(loader)
        seed = args.seed if args.data_seed is None else args.data_seed
        updates = grouped_loader(loader, args.gradient_accumulation_steps, first=first, seed=seed)
        schedule = (updates_per_epoch, batches, max_steps)
        assert _job is not None  # without it the Trainer's own loop runs
        self._run = TrainerRun(self, model, updates, Reader(loader), schedule, ignore_keys, _job)
        return self._run, samples

    def store_flos(self) -> None:
        """Add the operations of all ranks, unless the run is over and its last step has done so."""
        trainer: Any = self
        if self._run is not None or trainer.current_flos or not IS_WORKER:
            inner: Any = super()
            inner.store_flos()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log once a step: loggers get the entry when the step is committed."""
        inner: Any = super()
        with contextlib.nullcontext() if self._run is None else self._run.logs.kept():
            inner.log(logs, start_time)


class Trainer(RelightMixin, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that survives failures."""


class Seq2SeqTrainer(RelightMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """`transformers.Seq2SeqTrainer` that survives failures."""


def train(run: TrainerRun) -> None:
    """Take all steps of a run."""
    for step in run.training.steps(until=run.steps):
        if run.progress.is_over and not step.warmup:
            break  # also in a process that took a rank after the others had stopped
        with step as micro_batches:
            run.take(step, micro_batches)
        run.logs.end(committed=step.committed)
    run.follow_rank()  # it may have been taken after the last step
    run.logs.close()


def refuse_unsupported(trainer: Any, trial: Any) -> None:
    """Raise UsageError for what cannot be made recoverable, before anything is trained."""
    refuse(refused.TRAINER, refused.BY, trainer)
    if trial is not None:
        raise refused.SEARCH.error(refused.BY)
    if _has_own_loop(type(trainer)):
        raise refused.OWN_LOOP.error(refused.BY)
    _refuse_trl(trainer)


def _has_own_loop(kind: type) -> bool:
    """Return whether a class has a loop of its own; a method that goes on to the one here is none."""
    above = kind.__mro__[: kind.__mro__.index(RelightMixin)] if RelightMixin in kind.__mro__ else ()
    loops = [vars(each)["_inner_training_loop"] for each in above if "_inner_training_loop" in vars(each)]
    return any("_run_epoch" in vars(each) for each in above) or any(
        "_inner_training_loop" not in loop.__code__.co_names for loop in loops
    )


def _refuse_trl(trainer: Any) -> None:
    """Raise UsageError for a trainer of TRL, or a callback of its own, that is not supported."""
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    if not kinds:
        return
    if (kinds[0].__module__.split(".")[1], kinds[0].__name__) not in _KNOWN_OF_TRL:
        raise trl.GENERATING.error(refused.BY, f"{kinds[0].__name__} of TRL is not supported, SFTTrainer is")
    if getattr(trainer.args, "precompute_ref_log_probs", False):
        raise trl.PRECOMPUTED.error(refused.BY)
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ in _CHANGES_A_MODEL:
            raise trl.CHANGES_A_MODEL.error(refused.BY, type(callback).__name__)
