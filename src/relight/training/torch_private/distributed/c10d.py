"""Functions of c10d that use more of a process group than its operations."""

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join

from relight.errors import UsageError

__all__ = ["REFUSED_STORE", "Store", "adapt"]  # `Store` is public, and not exported to type checkers

_REFUSED = (
    "the default store of torch.distributed cannot be used in a relight job: what a rank puts there is not there for "
    "the process that replaces it. Exchange values with dist.all_gather_object or dist.broadcast_object_list, inside "
    "`with step` or before the loop, or through files"
)


class RefusedStore(Store):
    """The default store, as c10d sees it; groups have stores of their own."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UsageError(_REFUSED)

    set = get = wait = add = check = compare_set = delete_key = num_keys = append = multi_get = multi_set = _refuse


# Python's own half of it must live as long as C++ asks the other half.
REFUSED_STORE = RefusedStore()


class Groups(Protocol):
    """Tells relight's process groups from others."""

    def is_own(self, group: Any) -> bool:
        """Return whether a group is one of relight's."""

    def is_detached(self, group: Any) -> bool:
        """Return whether it has no peers at present."""

    def is_cut_off(self, group: Any) -> bool:
        """Return whether a recovery has taken its peers, and this operation cannot be repeated."""

    def meet(self, group: Any) -> bool:
        """A function of a group that is cut off is called: return whether all ranks are there now, and it is not."""

    def note_cut(self, group: Any, operation: str) -> None:
        """A function of a group that is cut off does what it does alone."""


def adapt(groups: Groups) -> None:
    """Have c10d's functions do with a relight group what they do with one of gloo, alone where it is detached."""
    alone: dict[str, Callable[..., Any]] = {
        "broadcast_object_list": lambda *_, **__: None,  # what the lists hold is this process's own
        "scatter_object_list": _scatter_alone,
        "recv_object_list": _receive_alone,
        "gather_object": _gather_alone,
        "all_gather_object": _gather_for_all_alone,
    }
    for name, replacement in alone.items():
        _replace(name, functools.partial(_or_alone, groups, replacement))
    _replace("monitored_barrier", functools.partial(_monitored_barrier, groups.is_own))
    Join.__init__ = _refuse_join(Join.__init__)  # type: ignore[method-assign]


def _refuse_join(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, joinables: Any, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        if enable:
            raise UsageError(
                "join() is for ranks with different numbers of batches; in relight's steps every rank has as many, and "
                "each writes as often as the others. Leave join() out, or call it with enable=False. Where ranks have "
                "different numbers of micro-batches, use model.no_sync() for all but the last of each rank"
            )
        original(self, joinables, enable, *args, **kwargs)

    return init


def _replace(name: str, wrap: Callable[[Any], Any]) -> None:
    replaced = wrap(getattr(distributed_c10d, name))
    setattr(distributed_c10d, name, replaced)
    setattr(dist, name, replaced)


def _or_alone(groups: Groups, alone: Callable[..., Any], original: Any) -> Any:
    """Call `alone` instead where a group is detached or cut off, also if that happens meanwhile.

    These functions receive sizes first, and alone there are none; nor can objects be read of which only a size came.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = _default(signature.bind(*args, **kwargs).arguments.get("group"))
        if groups.is_detached(group):
            return alone(*args, **kwargs)
        if not groups.is_cut_off(group) or groups.meet(group):
            try:
                return original(*args, **kwargs)
            except Exception:
                if not groups.is_cut_off(group):
                    raise
        groups.note_cut(group, original.__name__)
        return alone(*args, **kwargs)

    return call


def _default(group: Any) -> Any:
    return dist.GroupMember.WORLD if group is None else group


def _scatter_alone(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    **_: Any,
) -> None:
    """Take the source's own object, on the source; elsewhere the list keeps its contents."""
    source = group_src if group_src is not None else dist.get_group_rank(_default(group), src or 0)
    own = dist.get_rank(group)
    if scatter_object_input_list and source == own:
        scatter_object_output_list[0] = scatter_object_input_list[own]


def _receive_alone(object_list: list[Any], src: int | None = None, group: Any = None, **__: Any) -> int:
    """Return the source, or the next rank if any would do; the list keeps its contents."""
    del object_list
    return dist.get_global_rank(_default(group), _next_rank(group)) if src is None else src


def _next_rank(group: Any) -> int:
    return (dist.get_rank(group) + 1) % dist.get_world_size(group)


def _gather_alone(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _gather_for_all_alone(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _monitored_barrier(is_own: Callable[[Any], bool], original: Any) -> Any:
    """Use a plain barrier: the controller finds and replaces a rank that does not come."""

    @functools.wraps(original)
    def call(group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> Any:
        if is_own(_default(group)):
            return dist.barrier(group)
        return original(group, timeout, wait_all_ranks)

    return call
