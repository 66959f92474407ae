"""FSDP2 (`fully_shard`): its groups of parameters and their state.

See tests/training/test_fsdp_private.py. Nothing here imports FSDP2: a script that does not use it pays nothing.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _get_module_state

from relight.training.torch_private.distributed.mesh import Dimension, dimensions_of
from relight.training.torch_private.installed import refuse_missing_of


class ShardedModules:
    """The modules that `fully_shard` divided, with what FSDP2 keeps about the step under way."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found: dict[int, Any] = {}
        for module in modules:
            for child in module.modules():
                state: Any = _get_module_state(child)
                if any(kind.__name__ == "FSDPState" for kind in type(state).__mro__):  # other wrappers keep states too
                    found[id(state)] = state
        self._states = list(found.values())
        if self._states:
            refuse_missing_of("FSDP2")

    def __bool__(self) -> bool:
        return bool(self._states)

    def parameters(self) -> set[int]:
        """The `id` of each divided parameter."""
        return {id(parameter.sharded_param) for group in self._groups() for parameter in group.fsdp_params}

    def data_dimensions(self) -> set[Dimension]:
        """The dimensions of meshes along which every rank has a batch of its own."""
        found: set[Dimension] = set()
        for group in self._groups():
            info = group.mesh_info
            found |= dimensions_of(info.mesh)
            by_name = getattr(info, "dp_mesh_dims", None)
            if by_name is not None:
                found |= dimensions_of(info.spmd_mesh, [*by_name.shard_names, *by_name.replicate_names])
        return found

    def reshard(self) -> None:
        """Put the divided parameters in place of the gathered ones, which an evaluation may have left there."""
        for group in self._groups():
            group._to_sharded()

    def reset(self) -> None:
        """Forget a step that an exception ended in the middle of forward or backward.

        Nothing is waited for: what is in flight belongs to a broken generation, and its buffers are given up. FSDP2's
        own `reset_iter_state` waits, and keeps gradients of gathered parameters whose reduction never came: the
        repeated backward pass would add to them.
        """
        for state in self._states:
            idle = type(state._training_state).IDLE
            state._training_state = idle
            getattr(state, "_modules_to_run_forward", set()).clear()
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            context = state._comm_ctx
            _set(context, all_gather_state=None, reduce_scatter_state=None)
            for name in ("reduce_scatter_states", "post_forward_order", "_last_post_reduce_events"):
                getattr(context, name, []).clear()
        for group in self._groups():
            _set(
                group,
                _all_gather_result=None,
                _post_reduce_event=None,
                _all_reduce_state=None,
                _reshard_after_forward_event=None,
                _partial_reduce_output=None,
            )
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        self.reshard()

    def rebind(self) -> None:
        """This process has taken another rank than it was built as: other places in its groups, parts of other sizes.

        The contents of the parts are left as they are: they come from a peer.
        """
        for group in self._groups():
            group._to_sharded()
            for owner in (group, *group.fsdp_params):
                for info in (owner.mesh_info, owner.post_forward_mesh_info):
                    _place(info)
            for parameter in group.fsdp_params:
                _resize(parameter)

    def _groups(self) -> list[Any]:
        found = []
        for state in self._states:
            if hasattr(state, "_fsdp_param_groups"):
                found += state._fsdp_param_groups
            elif state._fsdp_param_group is not None:
                found.append(state._fsdp_param_group)
        return found


def _set(thing: Any, **values: Any) -> None:
    """Those attributes that this version of torch has."""
    for name, value in values.items():
        if hasattr(thing, name):
            setattr(thing, name, value)


def _place(info: Any) -> None:
    if hasattr(info, "shard_mesh_rank"):
        info.shard_mesh_rank = info.shard_process_group.rank()
    if hasattr(info, "replicate_mesh_rank"):
        info.replicate_mesh_rank = info.replicate_process_group.rank()


def _resize(parameter: Any) -> None:
    """The last parts of a dimension that does not divide evenly are shorter, and may be empty."""
    dimension = parameter.fsdp_placement.dim
    parts, part = getattr(parameter.mesh_info, "shard_mesh_size", 1), getattr(parameter.mesh_info, "shard_mesh_rank", 0)
    whole = parameter._orig_size[dimension]
    most = math.ceil(whole / parts)
    length = max(0, min(most, whole - part * most))
    size = list(parameter._orig_size)
    size[dimension] = length
    if list(parameter.sharded_size) == size:
        return
    padded = parameter._sharded_param_data.view(parameter.padded_sharded_param_size)
    local = padded.narrow(dimension, 0, length)
    parameter.sharded_size = torch.Size(size)
    parameter.contiguous_sharded_stride = local.stride()
    parameter.sharded_param._local_tensor = local
