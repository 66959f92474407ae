"""Notices changes before they are made: through `Tensor.data`, by methods of parameters, and of `requires_grad`.

`p.data.mul_(0.99)` and `p.data = q` are common in published scripts (momentum encoders, pruning, averaged models), and
autograd keeps no count of them. So while a loop of steps runs, `torch.Tensor.data` is a property that remembers which
of the watched tensors were reached for. What it gives has a counter of its own, which tells what was written through
it. A write that is not counted there either (through NumPy's view of it, say) shows in the bits alone.

Methods that write into a parameter in place (`nn.init.zeros_(head.bias)`, `p.mul_(0.99)`, `p[0] = 1`) are watched as
well. Version counters show afterwards that they wrote, and by then it is too late for a copy.

Flags of hundreds of parameters are costly to read in every step, so that one was set is noticed in the same way.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from relight.training.torch_private.autograd import not_compiled
from relight.training.torch_private.script_modes import unseen
from relight.training.torch_private.tensors import DATA, REQUIRES_GRAD, SET_REQUIRES_GRAD, WRITING, version_of

# From then on Python looks up attributes of a class slowly, once those of the class have changed a thousand times.
_EXCHANGES = sys.version_info < (3, 13)


class DataAccess:
    """Notes which of the watched tensors were read or written through `.data` since the last `clear`."""

    def __init__(self) -> None:
        self.reached: set[int] = set()  # by `id`
        self._watches_methods = False  # a write of a parameter can still be undone, so it needs a copy
        self._in_writes: dict[str, Any] = {}  # methods that are called while that is not so, as they are when watched
        self.flags_set = 0  # how often any tensor's `requires_grad` was set
        self._assigned: set[int] = set()
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tensors given other memory, with their first
        self._given: dict[int, torch.Tensor] = {}  # what `.data` gave first: it counts the writes of all that it gave
        self._watched: set[int] = set()

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watch these tensors instead of the earlier ones. The caller must keep them alive."""
        self._watched = {id(tensor) for tensor in tensors}

    def clear(self) -> None:
        self.reached.clear()
        self._assigned.clear()
        self._memory.clear()
        self._given.clear()

    def put_back(self) -> None:
        """Give tensors that were assigned other memory the memory that they had at the last `clear`."""
        for tensor, memory in self._memory.values():
            DATA.__set__(tensor, memory)
        self._memory.clear()

    @property
    def written(self) -> set[int]:
        """The `id` of each tensor written through `.data`, also with an equal value, as far as torch counts writes."""
        return self._assigned | {number for number, given in self._given.items() if _writes(given)}

    def install(
        self,
        before_reach: Callable[[torch.Tensor], None] = lambda _: None,
        before_method: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> None:
        """Begin. `before_reach` is called for a watched tensor before its `.data` is read or set first.

        `before_method` is called for a watched parameter before each method that writes into it, while
        `watch_methods` has said so.
        """
        watched_of, reached = self, self.reached

        @not_compiled
        def get(tensor: torch.Tensor) -> torch.Tensor:
            data: torch.Tensor = DATA.__get__(tensor)
            if id(tensor) in watched_of._watched:
                if id(tensor) not in reached:
                    reached.add(id(tensor))
                    before_reach(tensor)
                return watched_of._give(id(tensor), data)
            return data

        @not_compiled
        def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
            if id(tensor) in watched_of._watched:
                if id(tensor) not in reached:
                    reached.add(id(tensor))
                    before_reach(tensor)
                watched_of._note_assignment(tensor)
            DATA.__set__(tensor, value)

        @not_compiled
        def set_flag(tensor: torch.Tensor, value: bool) -> None:
            watched_of.flags_set += 1
            REQUIRES_GRAD.__set__(tensor, value)

        @not_compiled
        def requires_grad_(self: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
            watched_of.flags_set += 1
            changed: torch.Tensor = SET_REQUIRES_GRAD(self, requires_grad)
            return changed

        torch.Tensor.data = property(get, put)  # type: ignore[assignment]
        torch.Tensor.requires_grad = property(REQUIRES_GRAD.__get__, set_flag)  # type: ignore[assignment]
        torch.Tensor.requires_grad_ = requires_grad_  # type: ignore[assignment]
        for name, method in WRITING.items():
            setattr(nn.Parameter, name, self._writing(name, method, before_method))

    def watch_methods(self, watch: bool) -> None:
        """Watch methods that write into parameters from now on, or do not.

        Those that optimizers call are torch's own meanwhile: around each of their hundreds of calls, one of Python
        would take longer than all else that relight does in a step.
        """
        if watch is self._watches_methods:
            return
        self._watches_methods = watch
        for name, method in list(self._in_writes.items()):  # other threads may add to them
            now = vars(nn.Parameter).get(name)
            if watch and now is None:
                setattr(nn.Parameter, name, method)
            elif now is method and not watch:
                delattr(nn.Parameter, name)

    def remove(self) -> None:
        """Leave `torch.Tensor` as it was."""
        for name in ("data", "requires_grad", "requires_grad_"):
            if name in vars(torch.Tensor):
                delattr(torch.Tensor, name)
        self._in_writes.clear()
        for name in WRITING:
            if name in vars(nn.Parameter):
                delattr(nn.Parameter, name)
        self.clear()

    def _writing(
        self, name: str, method: Callable[..., Any], before: Callable[[torch.Tensor], None]
    ) -> Callable[..., Any]:
        watched_of = self

        @not_compiled
        @functools.wraps(method)
        def write(parameter: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not watched_of._watches_methods:
                if _EXCHANGES:
                    watched_of._in_writes[name] = write
            elif id(parameter) in watched_of._watched:
                before(parameter)
            return method(parameter, *args, **kwargs)

        return write

    @unseen
    def _note_assignment(self, tensor: torch.Tensor) -> None:
        self._assigned.add(id(tensor))
        self._given.pop(id(tensor), None)
        self._memory.setdefault(id(tensor), (tensor, DATA.__get__(tensor)))

    @unseen
    def _give(self, number: int, data: torch.Tensor) -> torch.Tensor:
        """Return `data`, or a tensor with its memory whose writes are counted together with those of earlier ones."""
        if type(data) is not torch.Tensor or data.layout is not torch.strided:
            return data
        given = self._given.get(number)
        if given is not None and given.data_ptr() == data.data_ptr() and given.shape == data.shape:
            return given.detach()
        if given is not None and _writes(given):
            self._assigned.add(number)
        self._given[number] = data
        return data


def _writes(given: torch.Tensor) -> int:
    """Return how often it was written; 1 for a tensor made in inference mode, which has no count."""
    return 1 if given.is_inference() else version_of(given)
