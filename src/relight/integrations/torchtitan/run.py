"""One call of torchtitan's `Trainer.train()` as steps that are committed or repeated as a whole.

What torchtitan does after an optimizer step (saving, validation) is done at the head of the next step's block, on the
same weights: there a failure repeats it. The run has one step more than optimizer steps for that. Loggers get the
values of a step once it is committed, through `relight.Training.log_to`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import relight
from relight.errors import UsageError

_VALIDATION = "validation loss"
_TRAINING = ("loss", "max loss", "grad_norm")


class TitanRun:
    """The steps of one run. `trainer` has built everything, and has loaded its checkpoint."""

    def __init__(self, trainer: Any, job: relight.Job) -> None:
        self._trainer = trainer
        self._max_steps: int = trainer.config.training.steps
        self._step: relight.Step | None = None  # the one under way
        self.progress = Progress(trainer)
        self._data = Data(trainer.dataloader)
        self.training = relight.Training(
            model=trainer.model_parts[0],
            optimizer=trainer.optimizers,
            scheduler=trainer.lr_schedulers,
            data=self._data,
            accumulate=trainer.gradient_accumulation_steps,
            rng="preserve",
            per_rank={"trainer": RankProgress(trainer)},
            progress=self.progress,
        )
        self._processor = trainer.metrics_processor
        self._lines = Lines(self._processor, self.progress)
        self.training.log_to(lambda: self._lines)
        job.on_rank_change(self._take_rank)

    @property
    def steps(self) -> int:
        """Steps of this run: those of the optimizer, and one for what follows the last.

        A standby counts from the job's first step until it learns where the others began.
        """
        return max(0, self._max_steps - self.progress.first) + 1

    def take(self, step: relight.Step, batches: Any) -> None:
        """Do one step: what follows the optimizer step before, then forward, backward and the write."""
        trainer, self._step = self._trainer, step
        number = trainer.step = self.progress.first + step.number
        if step.number > 0 and not step.warmup:
            self._follow(number)
        if number >= self._max_steps:
            trainer.optimizers.zero_grad()
            return
        trainer.step = number + 1
        trainer.gc_handler.run(trainer.step)
        groups = batches if trainer.gradient_accumulation_steps > 1 else [batches]
        trainer.train_step(trainer.batch_generator([(dict(inputs), labels) for inputs, labels in groups]))

    def _follow(self, number: int) -> None:
        trainer = self._trainer
        trainer.checkpointer.save(number, last_step=number == self._max_steps)
        if trainer.config.validator.enable and trainer.validator.should_validate(number):
            trainer.validator.validate(trainer.model_parts, number)

    @contextlib.contextmanager
    def writes_are_put_off(self) -> Iterator[None]:
        """Inside, optimizers and schedulers do not step: a logging step asks other ranks for values after that."""
        things = (self._trainer.optimizers, self._trainer.lr_schedulers)
        for thing in things:
            thing.step = _nothing
        try:
            yield
        finally:
            for thing in things:
                del thing.step  # the class's own again

    # --- logging --------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def logs(self) -> Iterator[None]:
        """Inside, what torchtitan logs is reported with its step."""
        processor = self._processor
        processor.log, processor.log_validation = self._log, self._log_validation
        try:
            yield
        finally:
            del processor.log, processor.log_validation

    def _log(
        self, step: int, average: float, largest: float, norm: float, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        del step
        self._report(dict(zip(_TRAINING, (average, largest, norm), strict=True)) | (extra_metrics or {}))

    def _log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        del step
        self._report(
            {_VALIDATION: loss} | {f"validation {name}": value for name, value in (extra_metrics or {}).items()}
        )

    def _report(self, values: dict[str, Any]) -> None:
        if self._step is not None and not self._step.warmup:
            self._step.report(**{name: float(value) for name, value in values.items()})

    # --- a standby takes a rank -----------------------------------------------------------------------------------
    def _take_rank(self, rank: int) -> None:  # noqa: ARG002
        """Build anew what depends on the rank and is no module of the model."""
        trainer, config = self._trainer, self._trainer.config
        mesh = trainer.parallel_dims.get_mesh("batch") if trainer.parallel_dims.dp_enabled else None
        size, place = (mesh.size(), mesh.get_local_rank()) if mesh is not None else (1, 0)
        checkpoint, accumulate = config.checkpoint, trainer.gradient_accumulation_steps
        trainer.dataloader = self._data.loader = config.dataloader.build(
            dp_world_size=size,
            dp_rank=place,
            tokenizer=trainer.tokenizer,
            seq_len=config.training.seq_len,
            local_batch_size=config.training.local_batch_size,
            snapshot_every_n_steps=checkpoint.interval * accumulate if checkpoint.enable else None,
        )
        if checkpoint.enable:
            trainer.checkpointer.states["dataloader"] = trainer.dataloader
        if config.validator.enable:
            trainer.validator.dp_rank = place
        self._processor.logger = self._processor._build_metric_logger(
            config=config.metrics,
            parallel_dims=trainer.parallel_dims,
            dump_folder=config.dump_folder,
            pp_schedule=config.parallelism.pipeline_parallel_schedule,
            config_dict=config.to_dict(),
        )


class Data:
    """A loader of torchtitan's, for the rank that this process has now."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader
        raise UsageError(
            "the data ran out before training.steps: torchtitan ends there, and relight needs the number of steps "
            "beforehand. Set training.steps to what the data has, or let the loader begin again (infinite)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return that of the loader."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Pass it on to the loader."""
        self.loader.load_state_dict(state)


class Progress:
    """The optimizer steps: of the checkpoint that the job's first ranks have loaded, and in all."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.first: int = trainer.step

    def state_dict(self) -> dict[str, int]:
        """Return plain values."""
        return {"first": self.first, "step": self._trainer.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over what `state_dict` returned."""
        self.first, self._trainer.step = state["first"], state["step"]


class RankProgress:
    """The tokens that a rank has seen."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, int]:
        """Return plain values."""
        return {"ntokens_seen": self._trainer.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over what `state_dict` returned."""
        self._trainer.ntokens_seen = state["ntokens_seen"]


class Lines:
    """Logs the values of committed steps as torchtitan does: its lines, TensorBoard, Weights & Biases."""

    def __init__(self, processor: Any, progress: Progress) -> None:
        self._processor, self._progress = processor, progress
        self._log, self._log_validation = processor.log, processor.log_validation

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        """Log the values of a step of relight, which computes an optimizer step and validates the one before."""
        number, rest = self._progress.first + step, dict(values)
        validation = {name: rest.pop(name) for name in values if name.startswith("validation ")}
        if validation:
            loss = validation.pop(_VALIDATION)
            extra = {name.removeprefix("validation "): value for name, value in validation.items()}
            self._log_validation(loss, number, extra_metrics=extra)
        if rest:
            average, largest, norm = (rest.pop(name) for name in _TRAINING)
            if not self._processor.data_loading_times:
                self._processor.data_loading_times.append(0.0)  # its mean is logged
            self._log(number + 1, average, largest, norm, extra_metrics=rest)


def _nothing() -> None:
    """Stand in for a step that is put off."""
