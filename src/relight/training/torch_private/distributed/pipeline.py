"""Pipelines (torch.distributed.pipelining): schedules and their stages.

See tests/training/test_pipeline_private.py. Nothing here imports them: a script that has no pipeline pays nothing.
"""

import gc
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from relight.errors import UsageError
from relight.training.shards import Cut
from relight.training.torch_private.installed import refuse_missing_of

_STAGES = "torch.distributed.pipelining.stage"


def ranks_along(stage: Any) -> tuple[int, ...]:
    """The ranks of the pipeline that this stage is of: among them they run every stage once."""
    return tuple(dist.get_process_group_ranks(stage.group))


class Pipelines:
    """The schedules that a script handed over, and the stages that this rank runs in them."""

    def __init__(self, pipeline: Any, parameters: Sequence[nn.Parameter]) -> None:
        """`pipeline` is a schedule, several, or None; `parameters` are those of the modules that were handed over.

        Raises UsageError if it is none, or runs modules that were not handed over.
        """
        if pipeline is None:
            self._schedules: list[Any] = []
        else:
            self._schedules = list(pipeline) if isinstance(pipeline, (list, tuple)) else [pipeline]
        if _STAGES in sys.modules:
            refuse_missing_of("pipelining")
        known = {id(parameter) for parameter in parameters}
        for schedule in self._schedules:
            if not hasattr(schedule, "_stage") and not hasattr(schedule, "_stages"):
                raise UsageError(
                    f"relight.Training(pipeline=...) got a {type(schedule).__qualname__}: hand over the schedule "
                    "(torch.distributed.pipelining.Schedule1F1B and the like) that the step runs"
                )
            _look_ahead_without_trace(schedule)
        for stage in self.stages():
            if any(id(parameter) not in known for parameter in stage.submod.parameters()):
                raise UsageError(
                    f"stage {stage.stage_index} of the pipeline runs a module that was not handed over: "
                    "relight.Training(model=...) must name the module of every stage that this rank runs"
                )
        if not self._schedules and _runs_stages(known):
            raise UsageError(
                "the model is a stage of a pipeline: hand over the schedule that runs it, "
                "relight.Training(..., pipeline=schedule), so that ranks of different stages are told apart"
            )

    def __bool__(self) -> bool:
        return bool(self._schedules)

    def stages(self) -> list[Any]:
        """Those that this rank runs."""
        return [stage for schedule in self._schedules for stage in _stages_of(schedule)]

    def stages_in(self, modules: Collection[nn.Module]) -> list[Any]:
        """Return this rank's stages that run (parts of) one of these modules."""
        known = {id(part) for module in modules for part in module.modules()}
        return [stage for stage in self.stages() if any(id(part) in known for part in stage.submod.modules())]

    def cuts(self) -> Iterator[Cut]:
        """Yield the stages that this rank holds, of how many."""
        for stage in self.stages():
            yield Cut("stage", stage.stage_index, stage.num_stages)

    def reset(self) -> None:
        """Clear the state that an exception in the middle of a schedule left. All ranks must call this.

        Nothing is waited for: sends and receives under way belong to a broken generation, and may still touch their
        buffers, which are given up. The next step makes new ones, and has the stages tell each other again what they
        send, as in the first step: a replacement does not know it yet.
        """
        for schedule in self._schedules:
            schedule._internal_losses.clear()
            for flag in vars(schedule).keys() & _INITIALIZED:
                setattr(schedule, flag, False)
            for name in ("backward_counter", "bwd_recv_ops", "fwd_recv_ops", "unshard_ops", "unsharded_stages"):
                getattr(schedule, name, _NOTHING).clear()
            for stage in _stages_of(schedule):
                for name in (
                    *("fwd_cache", "bwd_cache", "backward_state", "dw_runner", "output_chunks"),
                    *("args_recv_info", "grad_recv_info", "act_send_info"),
                ):
                    getattr(stage, name).clear()
                stage.grad_send_info = None


# Those of schedules with one stage a rank, and with several.
_INITIALIZED = {f"_{own}_{way}_initialized" for own in ("stage", "stages") for way in ("forward", "backward")}
_NOTHING: dict[str, Any] = {}


def _stages_of(schedule: Any) -> list[Any]:
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def _look_ahead_without_trace(schedule: Any) -> None:
    """Have torch's look ahead at shapes leave no trace: a step that is repeated has one more of them.

    In the first step, and the first after a recovery, torch runs every stage once on tensors without contents, to learn
    shapes. BatchNorm would count them, and DDP would reduce the gradients of the first microbatch alone.
    """
    original: Callable[..., Any] | None = getattr(schedule, "_initialize_pp_stages", None)
    if original is None:
        return

    def initialize(stages: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if all(stage.args_recv_info for stage in stages):  # in every other step
            return original(stages, *args, **kwargs)
        buffers = [buffer for stage in stages for buffer in stage.submod.buffers()]
        before = [buffer.detach().clone() for buffer in buffers]
        result = original(stages, *args, **kwargs)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        for stage in stages:
            if isinstance(stage.submod, DistributedDataParallel):
                stage.submod.reducer._reset_state()
        return result

    schedule._initialize_pp_stages = initialize


def _runs_stages(parameters: Collection[int]) -> bool:
    """Return whether some pipeline stage of this process runs a module with one of these parameters."""
    module = sys.modules.get(_STAGES)
    if module is None:
        return False
    kinds: list[Any] = [module._PipelineStageBase]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # An object refers to its class, so the collector finds the stages, in a quarter of the time that a look at each
    # object takes.
    stages = [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]
    return any(id(parameter) in parameters for stage in stages for parameter in stage.submod.parameters())
