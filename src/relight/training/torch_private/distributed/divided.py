"""DTensors by themselves: how one is divided, as plain values, and one made of a rank's part and these."""

from collections.abc import Iterable
from typing import Any

import torch

from relight.training.torch_private.distributed.mesh import is_distributed

Description = list[Any]  # names of the mesh's dimensions, its shape, its ranks, placements, shape, strides


def describe_division(tensor: Any) -> Description:
    """Return how a DTensor is divided; equal in each process that holds the same part."""
    placements = [[type(one).__name__, *_arguments_of(one)] for one in tensor.placements]
    return [*_describe_mesh(tensor.device_mesh), placements, list(tensor.shape), list(tensor.stride())]


def make_divided(part: torch.Tensor, described: Description, examples: Iterable[Any]) -> torch.Tensor:
    """Return a DTensor of this rank's `part`. Raises LookupError unless one of `examples` is on the same mesh."""
    from torch.distributed.tensor import DTensor, placement_types

    *mesh, placements, shape, stride = described
    for one in examples:
        if is_distributed(one) and _describe_mesh(one.device_mesh) == mesh:
            made = [getattr(placement_types, name)(*arguments) for name, *arguments in placements]
            with torch.no_grad():
                part = part.to(one.device)
                return DTensor.from_local(
                    part, one.device_mesh, made, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
                )
    raise LookupError(f"a DTensor on a mesh of shape {mesh[1]} that no parameter which was handed over is on")


def is_on_mesh_of_any(tensor: Any, examples: Iterable[Any]) -> bool:
    """Return whether `make_divided` can make one like `tensor` from these examples."""
    return any(is_distributed(one) and one.device_mesh == tensor.device_mesh for one in examples)


def _describe_mesh(mesh: Any) -> Description:
    return [list(mesh.mesh_dim_names or ()), list(mesh.shape), mesh.mesh.flatten().tolist()]


def _arguments_of(placement: Any) -> list[Any]:
    """Return what a placement of its class is made with."""
    if placement.is_partial():
        return [placement.reduce_op]
    if placement.is_replicate():
        return []
    split = getattr(placement, "split_factor", None)  # of a dimension that is divided along two of the mesh's
    return [placement.dim] if split is None else [placement.dim, split]
