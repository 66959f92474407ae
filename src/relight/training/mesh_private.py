"""Every private interface of DeviceMesh, DTensor and c10d's groups that relight leans on. Checked on torch 2.13.0.

See tests/training/test_mesh_private.py. torch.distributed.tensor is imported only for a script that uses it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from relight.errors import UsageError
from relight.training.shards import Cut


def watch_groups(made: Callable[[Sequence[int], bool], None]) -> None:
    """Have `made(ranks, members_only)` called for every group that is made from now on, before it is.

    Also for those that this process is not a member of: c10d names each one on every rank.
    """
    original: Any = distributed_c10d._process_group_name

    @functools.wraps(original)
    def named(ranks: Any, use_hashed_name: bool = False) -> Any:
        made(list(ranks), bool(use_hashed_name))
        return original(ranks, use_hashed_name=use_hashed_name)

    distributed_c10d._process_group_name = named


def regroup(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Tell c10d that these are the members of `group` from now on: its rank in there follows."""
    distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}


def follow_rank(provisional: int) -> None:
    """Have every DeviceMesh of this process, made before or after, know its place by the rank that it has now.

    A mesh keeps its coordinates from when it was made. A standby makes it as `provisional`, and learns later which
    rank it takes.
    """

    def coordinate(mesh: Any) -> Any:
        rank = dist.get_rank() if mesh._rank == provisional else mesh._rank
        found = (mesh.mesh == rank).nonzero()
        return tuple(found[0].tolist()) if len(found) else None

    def ignore(mesh: Any, value: Any) -> None:
        """What a mesh computes when it is made is not kept."""

    device_mesh.DeviceMesh._coordinate_on_dim = property(coordinate, ignore)  # type: ignore[assignment]


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor, of which each rank holds a part."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def cuts_of(tensor: torch.Tensor, world_size: int, name: str) -> Iterator[Cut]:
    """Along which dimensions of its mesh a DTensor is divided. Raises UsageError if ranks hold mere summands of it."""
    if not is_distributed(tensor):
        return
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise UsageError(f"{name} is placed on a device mesh that this rank is not in")
    names = mesh.mesh_dim_names or tuple(f"dimension {index}" for index in range(mesh.ndim))
    everyone = sorted(mesh._get_root_mesh().mesh.flatten().tolist())
    ranks = () if everyone == list(range(world_size)) else tuple(everyone)
    for dimension, coordinate, size, placement in zip(names, coordinates, mesh.shape, placements, strict=True):
        if placement.is_partial():
            raise UsageError(
                f"{name} is a DTensor that is not reduced yet ({placement} on mesh dimension {dimension!r}): "
                "redistribute it before it is handed over, so that each rank holds a part of its value"
            )
        if not placement.is_replicate():
            yield Cut(dimension, coordinate, size, ranks)


def fit_part(tensor: torch.Tensor) -> None:
    """Give a DTensor room for the part that this process's rank holds now; its contents are not kept."""
    if not is_distributed(tensor):
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, _ = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
    )
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    if tuple(part.shape) != tuple(shape):
        tensor._local_tensor = torch.empty(shape, dtype=part.dtype, device=part.device)  # type: ignore[attr-defined]


def as_part_like(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A DTensor divided as `whole` is, of which this rank holds `part`: an optimizer's state of that parameter."""
    from torch.distributed.tensor import DTensor

    spec = whole._spec  # type: ignore[attr-defined]
    with torch.no_grad():
        return DTensor(part.to(whole.device), spec, requires_grad=False)
