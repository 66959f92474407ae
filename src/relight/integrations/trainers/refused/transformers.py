"""Settings that `relight.integrations.transformers` refuses. Rows of `TRAINER` are asked `applies(trainer)`."""

from typing import Any

from relight.integrations.trainers.refused.table import LATE_CHANGE, WHEN_MET, Refusal

BY = "relight.integrations.transformers"


def _arg(name: str) -> Any:
    return lambda trainer: getattr(trainer.args, name, None)


TRAINER = (
    Refusal(
        "`deepspeed=...`",
        "DeepSpeed divides and writes parameters by itself",
        "leave it out: the model is trained with DDP",
        lambda trainer: trainer.is_deepspeed_enabled,
    ),
    Refusal(
        "`fsdp=...`",
        "the Trainer shards the model in a way that relight does not restore",
        "leave it out, or write a loop of your own with fully_shard, as examples/hsdp/train.py",
        lambda trainer: trainer.is_fsdp_enabled,
    ),
    Refusal(
        "`parallelism_config=...`, or a model that was loaded with a `tp_plan`",
        "ranks of one tensor or context group work on one batch, which the steps here do not know",
        "train data-parallel, or write a loop of your own (docs/PARALLEL.md)",
        lambda trainer: (
            getattr(trainer.args, "parallelism_config", None) is not None
            or getattr(trainer, "is_distributed_loading_by_transformers", False)
        ),
    ),
    Refusal(
        "`auto_find_batch_size=True`",
        "it starts training again with other batches",
        "find the size in a run of its own, and give it as per_device_train_batch_size",
        _arg("auto_find_batch_size"),
    ),
    Refusal(
        "several GPUs in one process (DataParallel)",
        "a rank is one process with one device",
        "start one process per GPU (relight run --nproc-per-node)",
        lambda trainer: trainer.args.n_gpu > 1,
    ),
    Refusal(
        '`train_sampling_strategy="batch_rebalance"`',
        "it lays out batches for a rank that is fixed",
        'another strategy, such as "group_by_length"',
        lambda trainer: getattr(trainer.args, "train_sampling_strategy", "") == "batch_rebalance",
    ),
    Refusal(
        "`enable_jit_checkpoint=True`",
        "each process would save by itself, at a moment of its own, when it gets SIGTERM",
        "save_steps, and `relight end RUN_DIR` or `relight drain`, which act between two steps on all ranks",
        _arg("enable_jit_checkpoint"),
    ),
    Refusal(
        '`optim="lomo"`, `"adalomo"`, and the layer-wise ones',
        "they write parameters during the backward pass, before any rank knows that all have come so far",
        'an optimizer that writes in step(), such as "adafactor"',
        lambda trainer: str(getattr(trainer.args.optim, "value", trainer.args.optim)).endswith(("lomo", "layerwise")),
    ),
)
SEARCH = Refusal(
    "`hyperparameter_search(...)`",
    "it trains several times in one process",
    "start a job for each trial",
)
OWN_LOOP = Refusal(
    "a subclass with a `_run_epoch` of its own, or an `_inner_training_loop` that does not go on to the one here",
    "relight would not call it",
    "override training_step, compute_loss, get_batch_samples or evaluate",
)
SECOND = Refusal(
    "a second `train()` in a process, also of another Trainer",
    "a job has one loop of steps, and a process that joins later could not know which one it is in",
    "a script and a job for each, the second of which loads what the first has saved; or more epochs in one",
)
ITERABLE = Refusal(
    "an `IterableDataset`, also a shuffled one",
    "a replacement could not find its place in it by an index",
    "a dataset with __len__ and __getitem__",
)
DISPATCHED = Refusal(
    "`dispatch_batches=True`",
    "rank 0 sends batches to the others, which a repeated step could not ask for again",
    "dispatch_batches=False",
)
INITIALIZED = Refusal(
    "`relight.init()` in the script",
    "the module joins the job when it is imported, and torch.distributed is initialized already",
    "leave it out",
    when="when the module is imported",
)
EPOCH_STOP = Refusal(
    "a callback that sets `control.should_epoch_stop`",
    "the steps of an epoch are laid out beforehand",
    "set should_training_stop, or make the epoch shorter",
    when=WHEN_MET,
)
LATE_LAYER = Refusal(
    "a callback that puts a layer into the model in a step (`model.head = nn.Linear(...)`), or makes an optimizer or "
    "an AveragedModel (`if state.global_step == 6: self.average = AveragedModel(model)`)",
    "a replacement has what the script builds before training begins, and would have no place for it",
    "make it in the model's __init__ or on_train_begin, and let a flag say from when it is used",
)
LATE_MODULE = Refusal(
    "a callback or Trainer of yours that makes a module in a step (`copy.deepcopy(model)` in the first `on_step_end`)",
    "a replacement has none, and modules are handed over as training begins",
    "make it in __init__ or on_train_begin, or keep a dict of tensors",
    when="in the first steps; later only said, and the bits are not vouched for after a failure",
)
KEPT_ITERATOR = Refusal(
    "an iterator over other data that a Trainer or callback keeps (`self.other = iter(loader)`, `next(self.other)`)",
    "neither a repeated step nor a replacement could find its place in it",
    "one dataset that gives both, or read the other one by an index made of state.global_step",
    when="in the second step",
)
TABLE = (
    *TRAINER,
    SEARCH,
    LATE_MODULE,
    LATE_LAYER,
    OWN_LOOP,
    SECOND,
    ITERABLE,
    KEPT_ITERATOR,
    DISPATCHED,
    INITIALIZED,
    EPOCH_STOP,
    LATE_CHANGE,
)
