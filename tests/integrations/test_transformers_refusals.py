"""Settings of Hugging Face's Trainer that are refused by name, without a job: each row of the table."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relight.errors import UsageError
from relight.integrations.trainers.refused import lightning, table, torchtitan, transformers, trl

CASES: dict[str, dict[str, Any]] = {
    "`deepspeed=...`": {"is_deepspeed_enabled": True},
    "`fsdp=...`": {"is_fsdp_enabled": True},
    "`parallelism_config=...`, or a model that was loaded with a `tp_plan`": {"args.parallelism_config": object()},
    "`auto_find_batch_size=True`": {"args.auto_find_batch_size": True},
    "several GPUs in one process (DataParallel)": {"args.n_gpu": 2},
    '`train_sampling_strategy="batch_rebalance"`': {"args.train_sampling_strategy": "batch_rebalance"},
    "`enable_jit_checkpoint=True`": {"args.enable_jit_checkpoint": True},
    '`optim="lomo"`, `"adalomo"`, and the layer-wise ones': {"args.optim": "galore_adamw_layerwise"},
}


def trainer(settings: dict[str, Any]) -> Any:
    """Make what a Trainer shows of its settings."""
    args = SimpleNamespace(auto_find_batch_size=False, n_gpu=0, optim="adamw_torch", enable_jit_checkpoint=False)
    made = SimpleNamespace(is_deepspeed_enabled=False, is_fsdp_enabled=False, args=args)
    for path, value in settings.items():
        *owner, name = path.split(".")
        setattr(made.args if owner else made, name, value)
    return made


def test_each_row_has_a_case() -> None:
    assert set(CASES) == {row.setting for row in transformers.TRAINER}
    table.refuse(transformers.TRAINER, transformers.BY, trainer({}))


@pytest.mark.parametrize("setting", CASES)
def test_refuses_by_name(setting: str) -> None:
    with pytest.raises(UsageError) as found:
        table.refuse(transformers.TRAINER, transformers.BY, trainer(CASES[setting]))
    assert setting in str(found.value)
    assert "Instead: " in str(found.value)


def test_each_row_is_used_by_code() -> None:
    """A row that is asked nowhere would be an empty promise."""
    source = "".join(
        path.read_text()
        for path in Path(table.__file__).parents[2].rglob("*.py")
        if path.parent.name != "refused" and "integrations" in path.parts
    )
    carried = "".join(path.read_text() for path in Path(table.__file__).parents[3].glob("training/**/*.py"))
    told_elsewhere = {
        "LATE_MODULE": "of_late_module",
        "ACCUMULATED": "gradients carried from step to step",
        "KEPT_ITERATOR": "it reads on in an iterator that",
    }
    for each in (transformers, lightning, torchtitan, trl):
        for name, value in vars(each).items():
            if not isinstance(value, table.Refusal) or name == "LATE_CHANGE":
                continue
            words = told_elsewhere.get(name)
            assert (words in carried) if words else f".{name}.error(" in source, f"{each.__name__}.{name}"
