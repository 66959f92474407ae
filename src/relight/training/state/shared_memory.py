"""Tensors of the state that share memory, so that a write to one changes the other.

Most do so from the start and in every process (views of one flat tensor). A step can make more of them:
`Optimizer.load_state_dict` keeps the tensors of a state dict that it is given, and a buffer may be assigned to another
one. A copy gives each tensor memory of its own, so it says which belong together, and its receiver joins them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from relight.training.state.handed.handed import Handed
from relight.training.state.handed.objects import trees_of
from relight.training.state.modules.slots import Slots, memory_of
from relight.training.state.optimizers.own_objects import ATTRIBUTES, is_own
from relight.training.state.optimizers.parameter_groups import others_of, parameters_of, resting_of
from relight.training.torch_private.distributed.mesh import is_distributed
from relight.training.torch_private.distributed.zero import state_of
from relight.training.torch_private.modules import tables_in
from relight.transfer.io.codec import Flat, local_part
from relight.transfer.io.strides import has_gaps, with_strides
from relight.words import listed

# Members of a group: the tensor's path, its first byte from that of the group, and a number that is equal for paths of
# one tensor object.
Member = tuple[str, int, int]
Group = tuple[Member, ...]
Groups = set[Group]


def groups_in(described: Any) -> Groups:
    """Return what `SharedMemory.describe` returned, as it is after its way through a message."""
    return {tuple((str(path), int(start), int(one)) for path, start, one in group) for group in described}


class _Place(NamedTuple):
    path: str
    tensor: torch.Tensor
    put: Callable[[torch.Tensor], None] | None  # None: only `load_state_dict` of an object can


class SharedMemory:
    """Says which tensors share memory, and makes it so."""

    def __init__(self, handed: Handed, slots: Slots) -> None:
        self._handed = handed
        self._slots = slots

    def describe(self) -> list[Group]:
        """Return the groups of tensors whose memory overlaps."""
        return _groups(self._places())

    def paths(self) -> set[str]:
        """Return the paths of tensors that share memory with others: a copy may not be received in place there."""
        return {path for group in self.describe() for path, _, _ in group}

    def separate(self, wanted: Groups) -> None:
        """Give tensors memory of their own that share it here, and not in the same way where a copy came from."""
        places = {place.path: place for place in self._places()}
        with torch.no_grad():
            for group in sorted(set(self.describe()) - wanted):
                for path, _, _ in group:
                    _separate(places[path])
        self._slots.refresh()

    def join(self, wanted: Groups, received: Collection[str]) -> str:
        """Make tensors share memory as where a copy came from, which has been put into place.

        `received` are the paths in the copy: it has a tensor under one of its names only. Returns the paths that cannot
        be joined, as a text.
        """
        own = set(self.describe())
        if own == wanted:
            return ""
        places = {place.path: place for place in self._places()}
        with torch.no_grad():
            for group in sorted(wanted - own):
                _join(group, places, received)
        self._slots.refresh()
        differing = sorted({path for group in wanted ^ set(self.describe()) for path, _, _ in group})
        return listed(differing)

    def gaps(self) -> dict[str, list[int]]:
        """Return the strides, by path, of tensors with gaps between their elements: slices of others."""
        parts = ((place.path, local_part(place.tensor)) for place in self._places())
        return {path: list(part.stride()) for path, part in parts if has_gaps(part)}

    def lay_out(self, gaps: Mapping[str, Sequence[int]]) -> None:
        """Give tensors the gaps that they have where a copy came from: sums go through memory in its order.

        Those of parameters, and where memory is shared, are what each process has made by itself.
        """
        own, shared = self.gaps(), self.paths()
        if own == gaps:
            return
        for place in list(self._places()):
            strides, tensor = gaps.get(place.path), place.tensor
            if place.put is None or place.path in shared or _is_trained(tensor) or is_distributed(tensor):
                continue
            if strides is not None and len(strides) == tensor.ndim and tensor.stride() != tuple(strides):
                place.put(with_strides(tensor.detach(), strides))
            elif strides is None and place.path in own:
                place.put(tensor.detach().clone(memory_format=torch.contiguous_format))
        self._slots.refresh()

    def _places(self) -> Iterator[_Place]:
        for owner, module in self._handed.modules.items():
            for name, child in module.named_modules():
                parameters, buffers, _ = tables_in(child)
                for table in (parameters, buffers):
                    start = f"modules.{owner}.tensors.{name}." if name else f"modules.{owner}.tensors."
                    held = {leaf: tensor for leaf, tensor in table.items() if tensor is not None}
                    yield from (_Place(start + leaf, tensor, _setter(table, leaf)) for leaf, tensor in held.items())
        for name, optimizer in self._handed.optimizers.items():
            start, kept = f"optimizers.{name}", state_of(optimizer)
            for number, group in enumerate(optimizer.param_groups):
                yield from _inside(
                    f"{start}.groups[{number}]", {k: v for k, v in group.items() if k != "params"}, group
                )
            members: list[tuple[Any, torch.Tensor]] = list(enumerate(parameters_of(optimizer)))
            members.extend(resting_of(optimizer, kept, self._slots.by_id).items())
            for key, parameter in members:
                kind = "state" if isinstance(key, int) else "resting"
                yield from _inside(f"{start}.{kind}.{key}", kept.get(parameter, {}))
            yield from _inside(f"{start}.others", others_of(kept), kept)
        objects = Flat(trees_of(self._handed.objects, self._handed), "objects")
        yield from (_Place(path, leaf, None) for path, leaf in zip(objects.paths, objects.leaves, strict=True))


def _inside(path: str, value: Any, table: Any = None) -> Iterator[_Place]:
    """The tensors in a dict, list or object, or in those in it; to be put into `table` if that is another one."""
    if is_own(value):
        yield from _inside(f"{path}.{ATTRIBUTES}", vars(value))
        return
    if isinstance(value, Mapping):
        items: Iterator[tuple[Any, str]] = ((key, f"{path}.{key}") for key in value)
    elif isinstance(value, list):
        items = ((index, f"{path}[{index}]") for index in range(len(value)))
    else:
        return
    for key, own in items:
        if isinstance(value[key], torch.Tensor):
            yield _Place(own, value[key], _setter(value if table is None else table, key))
        else:
            yield from _inside(own, value[key])


def _setter(table: Any, key: Any) -> Callable[[torch.Tensor], None]:
    def put(tensor: torch.Tensor) -> None:
        table[key] = tensor

    return put


def _groups(places: Iterable[_Place]) -> list[Group]:
    ranges: list[tuple[int, int, _Place | None]] = [(2**64, 2**64, None)]
    for place in places:
        part = local_part(place.tensor)
        if memory_of(part) and part.numel():
            steps = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            start = part.data_ptr()
            ranges.append((start, start + (steps + 1) * part.element_size(), place))
    ranges.sort(key=lambda one: one[0])
    found: list[Group] = []
    group: list[tuple[int, _Place]] = []
    limit = 0
    for start, end, one in ranges:
        if start >= limit:
            if len(group) > 1:
                found.append(_described(group))
            group = []
        if one is not None:
            group.append((start, one))
        limit = max(limit, end)
    return sorted(found)


def _described(group: list[tuple[int, _Place]]) -> Group:
    first = group[0][0]
    group.sort(key=lambda one: one[1].path)
    numbers: dict[int, int] = {}
    return tuple(
        (place.path, start - first, numbers.setdefault(id(place.tensor), len(numbers))) for start, place in group
    )


def _separate(place: _Place) -> None:
    if is_distributed(place.tensor):
        return
    copy = place.tensor.detach().clone()
    if _is_trained(place.tensor):
        place.tensor.data = copy
    elif place.put is not None:
        place.put(copy)


def _join(group: Group, places: Mapping[str, _Place], received: Collection[str]) -> None:
    if any(start for _, start, _ in group) or any(path not in places for path, _, _ in group):
        return
    first, *others = sorted(group, key=lambda member: _precedence(places[member[0]], received))
    kept = places[first[0]].tensor
    objects = {first[2]: kept}
    for path, _, number in others:
        place = places[path]
        if place.put is None or place.tensor.shape != kept.shape or place.tensor.dtype != kept.dtype:
            continue
        if number in objects:
            place.put(objects[number])
        elif _is_trained(place.tensor):
            place.tensor.data = kept.data
            objects[number] = place.tensor
        else:
            objects[number] = kept.detach()
            place.put(objects[number])


def _precedence(place: _Place, received: Collection[str]) -> tuple[bool, bool]:
    """Sort first the tensor whose memory the others are to share: one that was received, and rather a parameter."""
    return place.path not in received, not _is_trained(place.tensor)


def _is_trained(tensor: torch.Tensor) -> bool:
    """Return whether others know this very object: a parameter, or a tensor of no module that an optimizer has."""
    return isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)
