"""The tables of modules: their parameters, buffers, submodules, hooks and class, put back once a step is undone.

Pruning, parametrizations and `nn.Module.__setattr__` change them in many ways, some of which write straight into a
table. So they are compared with copies when a step begins; the copies are what the next step is undone to.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from relight.training.state.modules.hooks import hook_name
from relight.training.torch_private.distributed.mesh import is_distributed
from relight.training.torch_private.modules import buffers_in, hook_tables_in, modules_in, parameters_in

_FOREIGN = (
    "{path}: a parameter that was put there while the loop ran. Optimizer and DistributedDataParallel go on with those "
    "that were there before, nothing of this one is undone or copied, and a replacement has another. Write into the "
    "parameter instead: with torch.no_grad(): parameter.copy_(...)"
)

Table = dict[Any, Any]


class ModuleTables:
    """Compares and restores the tables of some modules."""

    def __init__(self) -> None:
        self.is_stale = True  # something that is not compared has changed: a class, a table itself
        self._modules: Mapping[int, tuple[str, nn.Module]] = {}
        self._find: Callable[[], None] = lambda: None
        self._own: dict[int, Any] = {}  # parameters that were there at first
        self._divided: set[int] = set()  # modules whose parameters are FSDP2's to exchange
        self._kinds: list[tuple[nn.Module, type]] = []
        self._hooks: dict[int, tuple[Table, Table]] = {}  # tables of hooks, by their ids, and what they held
        self._touched: list[Table] = []  # of these, since the last look
        self._live: list[Table] = []  # tables of parameters and submodules
        self._copies: list[Table] = []
        self._of_one_element: list[tuple[Table, str, Any]] = []  # parameters: equal to any other one of their value
        self._all_buffers: list[Table] = []  # tables of buffers, the tensors of which steps may exchange
        self._buffers: list[Table] = []  # those that are not empty
        self._buffer_counts: list[int] = []
        self._buffer_copies: list[Table] = []

    def watch(self, modules: Mapping[int, tuple[str, nn.Module]], find: Callable[[], None]) -> None:
        """Watch these modules, by their ids; `find` adds those that steps have made."""
        self._modules, self._find = modules, find
        for _, module in modules.values():
            own = [one for one in parameters_in(module).values() if one is not None]
            self._own.update((id(one), one) for one in own)
            if any(map(is_distributed, own)):
                self._divided.add(id(module))
        self.is_stale = True

    def begin(self) -> bool:
        """Copy the tables. Return whether others than expected are there: steps, or code between them, changed some."""
        if has_changed := self.is_stale or not self._are_same():
            self._look()
        while self._touched:
            table = self._touched.pop()
            self._hooks[id(table)] = table, table.copy()
        self._buffer_copies = list(map(dict.copy, self._buffers))
        return has_changed

    def see_hooks(self, hooks: Table) -> None:
        """A hook is registered or removed."""
        if id(hooks) in self._hooks:
            self._touched.append(hooks)

    def roll_back(self) -> bool:
        """Put back what `begin` has found. Return whether buffers have changed places."""
        for module, kind in self._kinds:
            if type(module) is not kind:
                object.__setattr__(module, "__class__", kind)
        for live, before in self._hooks.values():
            _put_back_hooks(live, before)
        self._touched.clear()
        for live, before in zip(self._live, self._copies, strict=True):
            _put_back(live, before)
        copies = {id(live): before for live, before in zip(self._buffers, self._buffer_copies, strict=True)}
        return sum(_put_back(live, copies.get(id(live), {})) for live in self._all_buffers) > 0

    def risk(self) -> str:
        """Return the reason why a recovery cannot vouch for equal bits: a parameter that was not there at first."""
        for path, module in self._modules.values():
            if id(module) not in self._divided:
                for name, one in parameters_in(module).items():
                    if isinstance(one, nn.Parameter) and id(one) not in self._own:
                        return _FOREIGN.format(path=f"{path}/{name}")
        return ""

    def _are_same(self) -> bool:
        if any(table.get(name) is not one for table, name, one in self._of_one_element):
            return False
        try:
            return self._live == self._copies and list(map(len, self._all_buffers)) == self._buffer_counts
        except (RuntimeError, ValueError, TypeError):  # tensors have been compared, so one took another's place
            return False

    def _look(self) -> None:
        self._find()
        modules = [module for _, module in self._modules.values()]
        self._kinds = [(module, type(module)) for module in modules]
        hooks = [table for module in modules for table in hook_tables_in(module)]
        self._hooks = {id(table): (table, table.copy()) for table in hooks}
        with_parameters = [module for module in modules if id(module) not in self._divided]
        self._live = [*map(parameters_in, with_parameters), *map(modules_in, modules)]
        self._copies = list(map(dict.copy, self._live))
        self._of_one_element = [
            (table, name, one)
            for table in map(parameters_in, with_parameters)
            for name, one in table.items()
            if isinstance(one, nn.Parameter) and (isinstance(one, UninitializedParameter) or one.numel() == 1)
        ]
        self._all_buffers = list(map(buffers_in, modules))
        self._buffers = list(filter(None, self._all_buffers))
        self._buffer_counts = list(map(len, self._all_buffers))
        self.is_stale = False


def _put_back(live: Table, before: Table) -> bool:
    """Give a table its former contents, in the former order. Return whether it had others."""
    if [*live] == [*before] and all(live[name] is one for name, one in before.items()):
        return False
    live.clear()
    live.update(before)
    return True


def _put_back_hooks(live: Table, before: Table) -> None:
    """Give a table of hooks the script's former ones; torch and relight look after their own."""
    wanted = {number: hook for number, hook in before.items() if number in live or hook_name(hook)}
    wanted |= {number: hook for number, hook in live.items() if number not in before and not hook_name(hook)}
    if [*live] != [*wanted]:
        live.clear()
        live.update(wanted)
