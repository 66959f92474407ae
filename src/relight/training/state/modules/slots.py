"""Places of the modules' parameters and buffers, and the tensors that share their memory."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from relight.training.torch_private.modules import buffers_in, parameters_in
from relight.transfer.io.codec import local_part
from relight.transfer.io.strides import strides_of

Key = tuple[str, str]  # of a parameter or buffer: the module that was handed over, and the name in it


class Slots:
    """Places of the modules' parameters and buffers: a buffer may be assigned anew at any time."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self.parameters: dict[Key, torch.Tensor] = {}
        self._tables: dict[Key, tuple[dict[str, Any], str]] = {}
        self._of_table: dict[int, list[Key]] = {}  # by `id`
        self.tensors: list[torch.Tensor] = []  # in the order of `keys`
        self.keys: list[Key] = []
        self.index: dict[Key, int] = {}  # the place of each key
        self.buffer_places: dict[str, list[int]] = {}  # of the buffers of each module that was handed over
        self.by_id: dict[int, Key] = {}
        for owner, module in modules.items():
            self.parameters |= {(owner, name): parameter for name, parameter in module.named_parameters()}
        self.refresh()

    def refresh(self) -> None:
        """Look where the buffers are now."""
        self._tables, self._of_table = {}, {}
        for owner, module in self._modules.items():
            for path, child in module.named_modules():
                table = buffers_in(child)
                for leaf, buffer in table.items():
                    if buffer is not None:  # also under a second name: a step may give each its own
                        key = owner, f"{path}.{leaf}" if path else leaf
                        self._tables[key] = (table, leaf)
                        self._of_table.setdefault(id(table), []).append(key)
        buffers = {key: table[leaf] for key, (table, leaf) in self._tables.items()}
        together = {**self.parameters, **buffers}
        self.keys, self.tensors = list(together), list(together.values())
        self.index = {key: place for place, key in enumerate(self.keys)}
        self.buffer_places = {owner: [self.index[key] for key in buffers if key[0] == owner] for owner in self._modules}
        self.by_id = {id(tensor): key for key, tensor in reversed(together.items())}
        self._by_memory: dict[int, torch.Tensor] | None = None
        self._with_siblings: tuple[list[Key], list[Key]] = [], []  # keys, and what `with_siblings` returned for them

    def holds(self, thing: torch.Tensor) -> bool:
        """Return whether a tensor is one of them, or shares the memory of one: a view, or what `.data` gave."""
        return id(thing) in self.by_id or self.holder(thing) is not None

    def holder(self, thing: torch.Tensor) -> torch.Tensor | None:
        """The one of them whose memory a tensor shares."""
        if self._by_memory is None:
            self._by_memory = {place: tensor for tensor in self.tensors if (place := memory_of(tensor))}
        place = memory_of(thing)
        found = self._by_memory.get(place)
        return found if found is not None and memory_of(found) == place else None  # it may have other memory since

    @property
    def buffers(self) -> dict[Key, torch.Tensor]:
        """The buffers as they are now."""
        return {key: table[leaf] for key, (table, leaf) in self._tables.items() if leaf in table}

    def get(self, key: Key) -> torch.Tensor:
        found = self.parameters.get(key)
        if found is not None:
            return found
        table, leaf = self._tables[key]
        buffer: torch.Tensor | None = table.get(leaf)
        return self.tensors[self.index[key]] if buffer is None else buffer  # a step has just removed it (a mask)

    def set(self, key: Key, value: torch.Tensor) -> None:
        """Put a received value into a parameter or buffer; if that is divided over ranks, into this rank's part.

        A buffer that steps have registered where it comes from is registered here as well.
        """
        if key not in self.index and (table := self._table_for(key)) is not None:
            device = next((one.device for one in self.parameters.values()), value.device)
            table[key[1].rpartition(".")[2]] = value.to(device, copy=True)
            self.refresh()
        slot = self.get(key)
        live = local_part(slot)
        is_alike = live.shape == value.shape and live.dtype == value.dtype
        if is_alike and (hasattr(slot, "to_local") or strides_of(live) == strides_of(value)):
            if live.data_ptr() != value.data_ptr():
                live.copy_(value)
        else:  # an observer's buffer, say, that takes its shape from the first batch
            self.replace(key, value.to(live.device))  # also if steps have changed how it lies in memory

    def has_place(self, key: Key) -> bool:
        """Return whether there is such a parameter or buffer, or a module that can be given one."""
        return key in self.index or self._table_for(key) is not None

    def _table_for(self, key: Key) -> dict[str, Any] | None:
        owner, name = key
        module = self._modules.get(owner)
        found = dict(module.named_modules()).get(name.rpartition(".")[0]) if module is not None else None
        return buffers_in(found) if found is not None else None

    def with_siblings(self, keys: list[Key]) -> list[Key]:
        """Return these, and all buffers of the modules of those that are buffers.

        BatchNorm's kernel counts no versions of its own.
        """
        if keys != self._with_siblings[0]:  # mostly each step writes the same ones
            found = (self._of_table[id(self._tables[key][0])] if key in self._tables else (key,) for key in keys)
            self._with_siblings = keys, list(dict.fromkeys(itertools.chain.from_iterable(found)))
        return [*self._with_siblings[1]]

    def of_module(self, module: nn.Module) -> list[Key]:
        """The buffers of a module itself."""
        return self._of_table.get(id(buffers_in(module)), [])

    def replace(self, key: Key, value: torch.Tensor) -> None:
        """Put a tensor of another shape, or other strides, where this one was."""
        if key in self.parameters:
            self.parameters[key].data = value
        else:
            table, leaf = self._tables[key]
            table[leaf] = value
            self.refresh()


def memory_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor has, perhaps together with others; 0 if it has none."""
    part = local_part(tensor)
    if part.layout is not torch.strided or part.is_meta:
        return 0
    try:
        return part.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor that only stands for another one
        return 0


def view_test(modules: Iterable[nn.Module]) -> Callable[[Any], bool]:
    """Return a test whether a tensor shares memory with a parameter or buffer now, as `spectral_norm`'s `weight` does.

    Args:
        modules: looked at once, when the first tensor is tested; of each its own parameters and buffers.
    """
    memories: set[int] = set()

    def is_view(value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or not (memory := memory_of(value)):
            return False
        if not memories:
            tensors = (t for m in modules for t in (*parameters_in(m).values(), *buffers_in(m).values()))
            memories.update(memory_of(tensor) for tensor in tensors if tensor is not None and not is_lazy(tensor))
        return memory in memories

    return is_view
