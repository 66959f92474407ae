"""Messages about variables that cannot be carried: why, and what to write instead."""

from types import GeneratorType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from relight.errors import UsageError
from relight.script_files import is_script_file
from relight.training.carried.code.source import short
from relight.training.carried.finding.kept import Kept
from relight.training.carried.reading.making import Made
from relight.training.carried.values.trees.words import name_of
from relight.training.torch_private.distributed.ddp import NOT_REDUCED

_HAND_OVER = 'model={{"model": model, "{0}": {0}}}), or, if it differs between ranks, per_rank={{"{0}": {0}}}'
_CHOOSE = "make all of them before the loop, and choose in each step: `{0} = late if step.number >= 1000 else early`"
_NOT_HERE = "If no step of this run comes there: training.carry(ignore=({!r},))"


def of_declared(thing: Any, problem: Exception) -> UsageError:
    """An object that `training.carry(...)` was given, and that holds what cannot be carried."""
    return UsageError(
        f"training.carry() was given {name_of(thing)}, which holds {problem}: carry tensors, numbers, strings, "
        "containers and objects of these, or generators of random numbers; hand over what has a state_dict(): "
        "relight.Training(..., per_rank={...})"
    )


def of_unknown_name(text: str) -> UsageError:
    return UsageError(f"training.carry({text!r}): the loop of steps sees no such name")


def of_text(where: str) -> UsageError:
    return UsageError(
        f"{where}: the code of this loop is in no file (`exec` has made it from a text), so what it carries from step "
        "to step cannot be found. Put it into a .py file, or name what it carries: training.carry("
        '"best", ...), or training.carry(ignore=("losses",)) for a name that no step depends on'
    )


def of_missing_name(name: str) -> UsageError:
    """A name that another process has, and this one does not."""
    return UsageError(
        f"{name} is carried from step to step, and this replacement has no such name: make it on every rank, before "
        "the loop"
    )


def of_counter(one: Kept) -> UsageError:
    """`enumerate(training.steps(...))`."""
    return UsageError(
        f"{one.where}: {one.name} is counted beside training.steps(), and a replacement would begin to count anew: "
        "use step.number"
    )


def of_function(name: str, where: str) -> UsageError:
    """A function that some step makes anew, with numbers of that step in it."""
    return UsageError(
        f"{where}: {name} stands for a function that steps make, and a replacement cannot get what that "
        "remembers: keep it in variables of the loop, which are carried, and give them to one function as arguments, "
        f"or write a class with these as attributes and a method __call__. {_NOT_HERE.format(name)}"
    )


def of_iterator(one: Kept, value: Any) -> UsageError:
    """An iterator that a step goes on with. A generator of the user's may hold anything, data or a schedule."""
    instead = "hand over the data (relight.Training(data=...)), or fetch it by step.number"
    if type(value).__module__ == "torch.utils.data.dataloader":
        instead = (
            "hand the loader over, relight.Training(data=loader), and take the batch from `with step as batch`; "
            "several as data=(loader, other), each of which begins anew at its own end (docs/DATA.md)"
        )
    if isinstance(value, GeneratorType) and is_script_file(value.gi_code.co_filename):
        instead = (
            f"if it yields data, {instead}; if it computes something from step to step (a learning rate), write it as "
            "a class that keeps its variables as attributes, which are carried, or as a function of step.number"
        )
    elif type(value).__module__ == "itertools":
        instead = f"{instead}; of a list, take values[step.number % len(values)]"
    return UsageError(
        f"{one.where}: {one.name}, {name_of(value)}, goes on from step to step, and a replacement would begin it anew: "
        f"{instead}"
    )


def of_module(one: Kept, module: nn.Module, *, is_part: bool) -> UsageError:
    """A variable of the script that stands for another module in some steps, or for one that steps change.

    `is_part`: of what was handed over.
    """
    if is_part:
        return UsageError(
            f"{one.where}: {one.name}, {name_of(module)}, is part of what was handed over, and code of a step puts "
            f"another parameter or layer into it, or lets {one.name} stand for another part. Write parameters in place "
            f"(with torch.no_grad(): parameter.copy_(...)); of layers, {_CHOOSE.format(one.name)}"
        )
    has_state = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
    instead = f"relight.Training({_HAND_OVER.format(one.name)}"
    if not has_state:
        instead = f"{instead}. If {one.name} stands for one module or another, {_CHOOSE.format(one.name)}"
    return UsageError(
        f"{one.where}: {one.name}, {name_of(module)}, changes from step to step, and was not handed over: {instead}"
    )


def of_module_by_values(module: str, tensor: str) -> UsageError:
    """A module that steps were seen to change."""
    return UsageError(
        f"{module} changes from step to step ({tensor}), and was not handed over: "
        f"relight.Training({_HAND_OVER.format(module)}"
    )


def of_made(name: str, made: Made) -> UsageError:
    """A module, optimizer or scheduler that some step makes, and later ones use: seen in the code."""
    keyword = {AveragedModel: "ema", LRScheduler: "scheduler", torch.optim.Optimizer: "optimizer"}
    given = next((word for kind, word in keyword.items() if issubclass(made.kind, kind)), "model")
    instead = {
        "optimizer": "or call add_param_group(...) of the one that there is, inside the block",
        "scheduler": "or let SequentialLR switch to it",
    }.get(
        given,
        "and use it from any step on, with values that are set inside the block (late.load_state_dict(...)). If "
        f"{name} stands for one or another, {_CHOOSE.format(name)}",
    )
    return UsageError(
        f"{short(made.file)}:{made.line}: {name} ({made.kind.__qualname__}), made by a step, goes on from step to "
        "step, and a replacement could not get it. Make it before the loop, and hand it over "
        f'(relight.Training({given}={{"{given}": {given}, "late": late}})), {instead}. {_NOT_HERE.format(name)}'
    )


def of_layer(made: Made) -> UsageError:
    """A layer that some step makes, and puts into a module which was handed over: seen in the code."""
    return UsageError(
        f"{short(made.file)}:{made.line}: a step makes {made.layer} ({made.kind.__qualname__}), and a replacement has "
        "what the script builds before its loop. Build the module with all its layers before relight.Training(...), "
        "and let a flag or a factor of zero say which of them work: flags and values are carried. "
        f"{_NOT_HERE.format(made.layer)}"
    )


def of_unfrozen(made: Made, name: str) -> UsageError:
    """Parameters that some step unfreezes, and that were frozen when DDP wrapped them: seen in the code."""
    return UsageError(
        f"{short(made.file)}:{made.line}: a step unfreezes {made.layer}. {NOT_REDUCED.format(name)}. "
        f"{_NOT_HERE.format(made.layer)}"
    )


def of_late_module(name: str, module: Any, tensor: str) -> UsageError:
    """A module that one of the first steps has made, and the next one changes: a replacement would have none."""
    return UsageError(
        f"{name}, {name_of(module)} that a step has made, changes from step to step ({tensor}), and a replacement "
        f'could not get it. Make it before the first step, and hand it over: relight.Training(model={{"model": model, '
        '"ema": ema}). With a Trainer of relight.integrations, make it in the callback\'s __init__, or in '
        "on_train_begin or on_fit_start: modules that are there when training begins are handed over"
    )


def of_data(where: str, name: str, holder: str) -> str:
    """An object that dataset, sampler or `collate_fn` holds, and that steps change: why that is told."""
    return f"{where}: {name} is changed by steps, and belongs to {holder}, which the data holds"


def of_data_read_again(because: str) -> UsageError:
    """Say that values read before cannot be read again alike."""
    return UsageError(
        f"{because} (as dataset, sampler, collate_fn, or in one of them), so that what was read before cannot be read "
        "again alike. Keep it in a variable, or in an object that the data does not hold. What follows from the epoch "
        "belongs into set_epoch(epoch) of the dataset or sampler, which relight calls when an epoch begins"
    )
