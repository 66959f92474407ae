"""Settings that `strategy="relight"` refuses. Rows are asked `applies(trainer)`, or with a callback."""

from collections.abc import Callable
from typing import Any

from relight.integrations.trainers.refused.table import LATE_CHANGE, WHEN_MET, Refusal

BY = 'strategy="relight"'
_PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
_THERE = "lightning."


def _is(name: str) -> Callable[[Any], bool]:
    return lambda thing: any(
        each.__name__ == name and each.__module__.startswith(_THERE) for each in type(thing).__mro__
    )


def _has_several_sizes(callback: Any) -> bool:
    return _is("GradientAccumulationScheduler")(callback) and len(callback.scheduling) > 1


def _freezes_before_training(trainer: Any) -> bool:
    if not any(map(_is("BaseFinetuning"), trainer.callbacks)):
        return False
    return any(not each.requires_grad for each in trainer.lightning_module.parameters())


TRAINER = (
    Refusal(
        "`reload_dataloaders_every_n_epochs`",
        "it makes other data in each process",
        "a dataset that a hook tells the epoch (on_train_epoch_start)",
        lambda trainer: trainer.reload_dataloaders_every_n_epochs,
    ),
    Refusal(
        "a precision plugin other than Lightning's plain, half, double and mixed ones",
        "it was not tried: it may keep state of its own, or write by itself",
        'precision="bf16-mixed", "16-mixed", "bf16-true", "64-true" or "32-true"',
        lambda trainer: type(trainer.precision_plugin).__name__ not in _PRECISIONS,
    ),
    Refusal(
        "`AsyncCheckpointIO`",
        "it writes after the step is over, so that an interrupted step could not take a file back",
        "leave it out",
        lambda trainer: _is("AsyncCheckpointIO")(trainer.strategy.checkpoint_io),
    ),
    Refusal(
        "`val_check_interval` as a time",
        "each rank would validate at a moment of its own",
        "give a number of batches",
        lambda trainer: getattr(trainer, "_val_check_time_interval", None) is not None,
    ),
    Refusal(
        "`BackboneFinetuning`, or a `BaseFinetuning` of yours, that freezes layers before training",
        'DDP wraps the model after that, and averages no gradients of what is frozen then, nor does strategy="ddp"',
        "freeze in on_train_start and unfreeze in on_train_epoch_start, with all parameters in the optimizer and "
        'strategy="relight_find_unused_parameters_true"',
        _freezes_before_training,
    ),
)
CALLBACK = (
    Refusal(
        "`BatchSizeFinder`",
        "it trains before the training, with other batches",
        "find the size in a run of its own",
        _is("BatchSizeFinder"),
    ),
    Refusal(
        "`LearningRateFinder`",
        "it trains before the training",
        "find the rate in a run of its own",
        _is("LearningRateFinder"),
    ),
    Refusal(
        "`StochasticWeightAveraging`",
        "it replaces the scheduler in the middle of training",
        "use WeightAveraging",
        _is("StochasticWeightAveraging"),
    ),
    Refusal(
        "`ModelPruning`",
        "it exchanges the parameters of layers in the middle of training, which a replacement would build without",
        "torch.nn.utils.prune in the module's __init__, and masks that hooks of the module change",
        _is("ModelPruning"),
    ),
    Refusal(
        "`SpikeDetection`",
        "it stops with an exception and notes batches in a file, by which a later run skips them",
        "leave it out",
        _is("SpikeDetection"),
    ),
    Refusal(
        "`GradientAccumulationScheduler` with several values",
        "the steps of an epoch are laid out beforehand, with one size",
        "one accumulate_grad_batches",
        _has_several_sizes,
    ),
)
LATE_LAYER = Refusal(
    "a hook that puts a layer into the LightningModule in a step (`self.teacher = copy.deepcopy(self.net)`), or makes "
    "an optimizer or an AveragedModel",
    "a replacement has what the script builds before training begins, and would have no place for it",
    "make it in __init__, configure_model or on_fit_start, and let a flag say from when it is used",
)
LATE_MODULE = Refusal(
    "a callback of yours that makes a module in a step (a copy of the model, say)",
    "a replacement has none, and modules are handed over as training begins",
    "make it in __init__ or on_fit_start, or keep a dict of tensors",
    when="in the first steps; later only said, and the bits are not vouched for after a failure",
)
NO_LENGTH = Refusal(
    "an `IterableDataset` without a length",
    "the training data has no length, so a replacement could not find its place in it",
    "a dataset with __len__ and __getitem__, or limit_train_batches=NUMBER and data that begins anew each time",
)
OWN_FETCHING = Refusal(
    "`training_step(dataloader_iter)`",
    "it draws its batches by itself",
    "take a batch",
)
NO_OPTIMIZER = Refusal(
    "`configure_optimizers` that returns no optimizer",
    "there is nothing to train",
    "return one",
)
SECOND = Refusal(
    "a second `fit()` in a process, also of another Trainer",
    "relight protects one loop of steps, and trainer.fit() is called a second time in one process",
    "give the first call more epochs (max_epochs), or start two jobs, the second from a checkpoint (ckpt_path)",
)
OTHER_VERSION = Refusal(
    "another version of Lightning",
    "the loops that are replaced are no public interface",
    "pip install 'relight[lightning]'",
)
TWO = Refusal(
    "a second integration in the process, or `relight.init()`",
    "the strategy joins the job, and the Job is trainer.strategy.job",
    "use one of them, and leave out relight.init()",
)
DEVICES = Refusal(
    "`devices` and `num_nodes` that are not the number of ranks",
    "relight starts the processes",
    "make `relight run --nproc-per-node` and devices equal",
)
OF_DDP = Refusal(
    "`start_method`, `cluster_environment`, `model_averaging_period` of DDPStrategy",
    "relight starts the processes, and averages nothing",
    "leave them out",
)
SKIPPED = Refusal(
    "`on_train_batch_start` that returns -1",
    "the steps of an epoch are laid out beforehand",
    "set trainer.should_stop, or limit_train_batches",
    when=WHEN_MET,
)
LATE_SCHEDULE = Refusal(
    "`scheduler.step()` by hand in a hook that follows the optimizer step",
    "relight takes it for the write of the next step",
    "call it at the end of training_step (`if self.trainer.is_last_batch: scheduler.step()`)",
    when=WHEN_MET,
)
ACCUMULATED = Refusal(
    "manual optimization that accumulates more than 32 MiB of gradients over several batches",
    "a step is one batch; gradients that go on to the next one are kept for a replacement, in memory of a fixed size",
    "automatic optimization with accumulate_grad_batches, or larger batches",
    when="in the first batch without an optimizer step",
)
BATCH = Refusal(
    "a hook `on_train_batch_end` of yours, if batches or outputs are more than tensors, lists, tuples and dicts",
    "they are kept for a replacement, which calls the hook",
    "let the data and training_step give such values",
    when="in the first step",
)
TABLE = (
    *TRAINER, *CALLBACK, LATE_MODULE, LATE_LAYER, NO_LENGTH, OWN_FETCHING, NO_OPTIMIZER, SECOND, OTHER_VERSION,
    TWO, DEVICES, OF_DDP, SKIPPED, LATE_SCHEDULE, ACCUMULATED, BATCH, LATE_CHANGE,
)  # fmt: skip
