"""Objects that a script may not hand over: each check raises UsageError, which names the object and what to do."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from relight.errors import UsageError
from relight.training.state.handed.handed import Handed, Stateful
from relight.training.state.handed.schedulers import follows, missing_schedulers
from relight.training.torch_private.distributed.ddp import stateful_hooks
from relight.training.torch_private.distributed.zero import ZeroOptimizers

# Classes of torch.distributed by name, so that nothing has to be imported for the check.
_UNSUPPORTED = {
    "FullyShardedDataParallel": "use FSDP2 (torch.distributed.fsdp.fully_shard) with a replicate dimension",
}


def refuse_untrackable(handed: Handed) -> None:
    """Refuse objects whose state could not be copied, or that miss a companion."""
    _refuse_stateless({**handed.objects, **handed.per_rank})
    _refuse_averages_per_rank(handed.per_rank)
    for name, thing in (*handed.modules.items(), *handed.optimizers.items()):
        for part in thing.modules() if isinstance(thing, nn.Module) else [thing]:
            _refuse_kind(name, part)
            _refuse_sparse(name, part)
    for name in handed.optimizers:
        refuse_foreign_parameters(handed, name)


def refuse_foreign_parameters(handed: Handed, name: str) -> None:
    """Refuse an optimizer that updates parameters of a module which was not handed over."""
    owned = {id(p) for p in handed.parameters}
    for index, group in enumerate(handed.optimizers[name].param_groups):
        foreign = {id(p) for p in group["params"]} - owned
        if foreign:
            _refuse_new_parameters(handed, foreign)
            raise UsageError(
                f"parameter group {index} of {name} holds parameters of a module that was not handed over: "
                "relight.Training(model={...}) must name every module that trains, also one that joins later. "
                "Parameters of no module that join later go into an nn.ParameterList, which is passed as a model"
            )


def _refuse_new_parameters(handed: Handed, foreign: set[int]) -> None:
    """Refuse parameters that a step has put into a module in the place of those that were handed over with it."""
    for module_name, module in handed.modules.items():
        for name, parameter in module.named_parameters():
            if id(parameter) in foreign:
                raise UsageError(
                    f"a step has made the parameter {name} of {module_name} anew, and given it to an optimizer: a "
                    f"replacement has that of the script's start, of another size perhaps. Change the one that is "
                    f"there (`{name}.data.copy_(...)`); if its size changes, give it room for the largest before the "
                    "loop, and keep a mask of the rows in use in a buffer"
                )


def refuse_averages_of_zero(handed: Handed, zero: ZeroOptimizers) -> None:
    """Refuse an average of parameters that arrive after the write: a failure before they do would leave it wrong."""
    averages = [name for name, module in handed.modules.items() if isinstance(module, AveragedModel)]
    if zero and averages:
        raise UsageError(
            f"{averages[0]} averages parameters that a ZeroRedundancyOptimizer sends to other ranks after its "
            "write: should a failure strike just there, the average would be of old ones. Use an optimizer that is "
            "not divided, or leave the average out"
        )


def late_scheduler(made: Iterable[Any], optimizers: dict[str, Optimizer], handed: Iterable[Any]) -> str:
    """Say which of the schedulers that steps have made is still there, and was not handed over; "": none is."""
    known = set(map(id, handed))
    late = [one for one in made if id(one) not in known and follows(one, optimizers.values())]
    if not late:
        return ""
    return (
        f"a step has made a scheduler ({type(late[0]).__qualname__}), which a replacement has not: make it before the "
        "loop, and hand it over (relight.Training(..., scheduler={...})), or let SequentialLR switch to it"
    )


def _refuse_stateless(objects: dict[str, Any]) -> None:
    for name, thing in objects.items():
        if not isinstance(thing, Stateful):
            raise UsageError(
                f"relight.Training({name}=...) got a {type(thing).__qualname__}, which has no state_dict() and "
                "load_state_dict(): add them (as in torch.distributed.checkpoint's Stateful), or do not hand it "
                "over"
            )


def _refuse_averages_per_rank(per_rank: dict[str, Any]) -> None:
    for name in [name for name, thing in per_rank.items() if isinstance(thing, AveragedModel)]:
        raise UsageError(
            f"relight.Training(per_rank={{{name!r}: ...}}) got an AveragedModel: hand it over as ema=..., or by "
            "another keyword. Its parameters are equal on all ranks, and relight sees by itself which of its "
            "buffers are not"
        )


def _refuse_kind(name: str, part: Any) -> None:
    """Refuse a module or optimizer that looks replicated and is not."""
    instead = _UNSUPPORTED.get(type(part).__name__)
    if instead and type(part).__module__.startswith("torch.distributed."):
        raise UsageError(f"{name} uses {type(part).__qualname__}, which relight cannot restore: {instead}")
    if isinstance(part, torch.jit.ScriptModule):
        raise UsageError(
            f"{name} has a module compiled by torch.jit ({part.original_name}), whose tensors relight cannot exchange. "
            "Pass the module itself, or torch.compile(module). Functions may be compiled by torch.jit.script"
        )
    for hook in stateful_hooks(part):
        raise UsageError(
            f"{name} has a communication hook of DDP with a state of its own ({type(hook).__qualname__}): it differs "
            "on each rank, no other rank has a copy, and an aborted step changes it. Use a hook without state, such as "
            "fp16_compress_hook, or none"
        )


def _refuse_sparse(name: str, part: Any) -> None:
    """Refuse tensors whose elements do not lie side by side: they have no memory of a fixed size to copy into."""
    if not isinstance(part, nn.Module):
        return
    for own, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"{own} in {name} ({type(part).__qualname__}) has the layout {tensor.layout}, and relight copies "
                "dense ones only. Keep its indices and values as two buffers, or make it in forward"
            )


def refuse_missing_schedulers(optimizers: dict[str, Optimizer], handed: Iterable[Any]) -> None:
    """Refuse a scheduler of one of the optimizers that is not among the objects handed over, however it is called."""
    for scheduler in missing_schedulers(optimizers.values(), handed):
        name = next(name for name, one in optimizers.items() if follows(scheduler, [one]))
        raise UsageError(
            f"a scheduler of {name} ({type(scheduler).__qualname__}) was not handed over, and a replacement would "
            "begin it anew: relight.Training(..., scheduler=...), or a dict or list of several; with a framework's "
            "Trainer, give it to that, or make it in a callback's __init__, on_train_begin or on_fit_start"
        )
