"""DeviceMesh, DTensor and c10d's groups.

See tests/training/test_mesh_private.py. torch.distributed.tensor is imported only for a script that uses it.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from relight.errors import UsageError
from relight.training.shards import Cut, batch_groups
from relight.training.torch_private.installed import refuse_missing_of


class GroupMade(Protocol):
    """A process group is about to be made; `members_only`: other ranks do not learn of it."""

    def __call__(self, ranks: Sequence[int], /, *, members_only: bool) -> None: ...


def watch_groups(made: GroupMade) -> None:
    """Have `made` called before every group that is made from now on.

    Also for groups that this process is not a member of: c10d names each one on every rank.
    """
    original: Any = distributed_c10d._process_group_name

    @functools.wraps(original)
    def named(ranks: Any, use_hashed_name: bool = False) -> Any:
        made(list(ranks), members_only=bool(use_hashed_name))
        return original(ranks, use_hashed_name=use_hashed_name)

    distributed_c10d._process_group_name = named


def watch_skips(skipped: Callable[[], None]) -> None:
    """Have this called whenever c10d skips an operation, since the process is no member of the group."""
    original: Any = distributed_c10d._warn_not_in_group

    @functools.wraps(original)
    def warn(operation: str) -> None:
        skipped()
        original(operation)

    distributed_c10d._warn_not_in_group = warn  # type: ignore[assignment]


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
        known = vars(mesh).get("_relight_place")  # asked for in every step
        if known is None or known[0] != rank:
            found = (mesh.mesh == rank).nonzero()
            known = (rank, tuple(found[0].tolist()) if len(found) else None)
            vars(mesh)["_relight_place"] = known
        return known[1]

    def ignore(mesh: Any, value: Any) -> None:
        """Drop the coordinates that a mesh computes when it is made."""

    device_mesh.DeviceMesh._coordinate_on_dim = property(coordinate, ignore)  # type: ignore[assignment]


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether this is a DTensor, of which each rank holds a part."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


Dimension = tuple[int, int]  # of a root mesh: its id, and the number of the dimension


def dimensions_of(mesh: Any, names: Sequence[str] | None = None) -> set[Dimension]:
    """Those of a mesh, or of a slice of one, or some of them by name; of a flattened one, those that it is made of."""
    root = mesh._get_root_mesh()
    if not root.mesh_dim_names:
        return {(id(root), index) for index in range(root.ndim)}
    chosen = mesh.mesh_dim_names if names is None else names
    found = {(id(root), root.mesh_dim_names.index(name)) for name in chosen if name in root.mesh_dim_names}
    if mesh.ndim == 1 and mesh.mesh_dim_names[0] not in root.mesh_dim_names:
        found |= {(id(root), index) for index in _spanned(root, mesh.mesh.flatten().tolist())}
    return found


def _spanned(root: Any, ranks: Sequence[int]) -> tuple[int, ...]:
    """Along which dimensions of `root` one has to go, from this rank on, to meet just these ranks."""
    here = root.get_coordinate()
    for count in range(root.ndim + 1):
        for chosen in itertools.combinations(range(root.ndim), count):
            place = tuple(slice(None) if index in chosen else here[index] for index in range(root.ndim))
            if sorted(root.mesh[place].flatten().tolist()) == sorted(ranks):
                return chosen
    return ()


def batch_place(
    tensors: Iterable[torch.Tensor],
    by_data: Collection[Dimension],
    rank: int,
    world_size: int,
    *,
    pipelines: bool = False,
) -> int:
    """Return which of a step's batches `rank` computes on.

    It is the rank itself, unless tensors are divided along dimensions of a mesh other than those `by_data`, along which
    FSDP2 gives every rank a batch of its own. Along others (tensor parallelism) ranks compute on one batch together.
    With `pipelines` they do so along all others, also where no tensor is divided along them.
    """
    together: set[int] = set()
    roots: dict[int, Any] = {}
    for tensor in filter(is_distributed, tensors):
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        names = mesh.mesh_dim_names or range(mesh.ndim)
        for name, placement in zip(names, tensor.placements, strict=True):  # type: ignore[attr-defined]
            found = dimensions_of(mesh, [name]) if mesh.mesh_dim_names else {(id(mesh), name)}
            if not placement.is_replicate() and not found <= set(by_data):
                together |= {index for _, index in found}
                roots[id(mesh._get_root_mesh())] = mesh._get_root_mesh()
        if pipelines:
            root = mesh._get_root_mesh()
            together |= {index for index in range(root.ndim) if (id(root), index) not in by_data}
            roots[id(root)] = root
    if len(roots) != 1:
        return rank
    (root,) = roots.values()
    ranks = root._layout.remap_to_tensor(root._rank_map).flatten().tolist()
    if sorted(ranks) != list(range(world_size)):
        return rank
    groups = batch_groups(tuple(root.shape), ranks, together)
    return next(place for place, group in enumerate(groups) if rank in group)


def cuts_of(tensor: torch.Tensor, world_size: int, name: str) -> Iterator[Cut]:
    """Along which dimensions of its mesh a DTensor is divided. Raises UsageError if ranks hold mere summands of it."""
    if not is_distributed(tensor):
        return
    refuse_missing_of("DTensor")
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


def part_shape(spec: Any) -> tuple[int, ...]:
    """Return the shape of the part of a DTensor that this process's rank holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, _ = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return tuple(shape)


def place_in_whole(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the whole of which this process's rank holds a part, and where in it that part begins."""
    if not is_distributed(tensor):
        return tuple(tensor.shape), (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    spec = tensor._spec  # type: ignore[attr-defined]
    _, offset = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return tuple(spec.shape), tuple(offset)


def is_of_first_copy(tensor: torch.Tensor, pipeline: Sequence[int], name: str) -> bool:
    """True if this rank's part of the tensor belongs to the same copy of it as rank 0's, or as that rank's stage.

    Where values differ between ranks that hold the same part, the copy is the one that rank 0 is in. `pipeline`: ranks
    that hold a stage each, this one among them; alone: there is no pipeline. Raises UsageError if no mesh tells.
    """
    if not is_distributed(tensor):
        return 0 in pipeline
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    root = mesh._get_root_mesh()
    along = set(_spanned(root, pipeline))
    if 0 not in root.mesh or (len(pipeline) > 1 and not along):
        raise UsageError(f"publish(): {name} is placed on a device mesh that does not tell its place from rank 0's")
    names = mesh.mesh_dim_names or range(mesh.ndim)
    for dimension, placement in zip(names, tensor.placements, strict=True):  # type: ignore[attr-defined]
        if not placement.is_replicate():
            found = dimensions_of(mesh, [dimension]) if mesh.mesh_dim_names else {(id(root), dimension)}
            along |= {index for _, index in found}
    here = root.get_coordinate()
    place = tuple(slice(None) if index in along else here[index] for index in range(root.ndim))
    return 0 in root.mesh[place]


def fit_part(tensor: torch.Tensor) -> None:
    """Give a DTensor room for the part that this process's rank holds now; its contents are not kept."""
    if not is_distributed(tensor):
        return
    shape = part_shape(tensor._spec)  # type: ignore[attr-defined]
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    if tuple(part.shape) != tuple(shape):
        tensor._local_tensor = torch.empty(shape, dtype=part.dtype, device=part.device)  # type: ignore[attr-defined]


def as_part_like(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A DTensor divided as `whole` is, of which this rank holds `part`: an optimizer's state of that parameter."""
    from torch.distributed.tensor import DTensor

    spec = whole._spec  # type: ignore[attr-defined]
    with torch.no_grad():
        return DTensor(part.to(whole.device), spec, requires_grad=False)
