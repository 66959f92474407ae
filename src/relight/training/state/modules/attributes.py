"""Attributes that a step assigns to modules: undone with the step, and carried to a replacement.

A counter (`self.updates += 1`), a temperature, `train()` and `eval()`, a buffer that is assigned anew: all of these go
through `nn.Module.__setattr__`, which is wrapped while a loop of steps runs, and writes a log of the values before.
Containers that are changed in place (`self.history.append(...)`) do not; they are compared in the first steps, and
those that change are copied at the start of every step from then on.

Attributes that change and hold plain values are state of this rank alone, like buffers that change in forward.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from relight.errors import UsageError
from relight.training.state.modules.attribute_uses import describe_not_kept, is_not_kept, is_state
from relight.training.state.modules.hooks import HookLog
from relight.training.state.modules.plain_values import (
    EXCERPT_BYTES,
    is_mutable,
    is_too_large,
    pack,
    plain_bytes,
    put_in_place,
    unpack,
)
from relight.training.state.modules.slots import view_test
from relight.training.state.modules.tables import ModuleTables
from relight.training.state.values.marks import changed, put_back, remember
from relight.training.torch_private.autograd import not_compiled
from relight.training.torch_private.modules import (
    OWN_ATTRIBUTES,
    buffers_in,
    is_wrapper,
    tables_in,
    wrapper_attributes,
)

_MISSING = object()
_GONE = "\x01gone"  # stands for an attribute that was deleted, or is a parameter, buffer or module now
# Undone with a step, and never state: torch's own, and of Lightning's modules the name of the hook that is called just
# now, and the `id` of each metric.
_NO_STATE = OWN_ATTRIBUTES | {"_current_fx_name", "_metric_attributes"}
_OF_STRUCTURE = ("__class__", "_parameters", "_buffers", "_modules")
_MOST_STEADY = 32  # containers that no step has changed so far, compared in every step: some microseconds each

Key = tuple[int, str]  # `id` of a module, and the attribute's name


class ModeWatcher(Protocol):
    """Acts before a module changes its mode."""

    def before_mode(self, module: nn.Module) -> None:
        """`module.training` is about to be set."""


class AttributeLog:
    """Logs the attributes of modules, in the step under way and since the loop began."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._paths: dict[int, tuple[str, nn.Module]] = {}
        self._inner: dict[int, tuple[str, nn.Module]] = {}  # less wrappers, whose tables torch looks after
        self._before: dict[Key, tuple[dict[str, Any], Any]] = {}  # in the step under way: where it stood, and the value
        self._state: dict[str, Key] = {}  # attributes that are state, by their paths
        self._first: dict[str, Any] = {}  # of these, packed values before any step changed them, where that is known
        self._looked_at: set[Key] = set()
        self._change_in_place: set[Key] = set()  # containers that steps change without assigning them
        # Marks of these when the step began; of containers that the step is not known to change; and of those that no
        # step has changed so far, of modules of the script's own.
        self._in_place: dict[Key, Any] = {}
        self._compared: dict[Key, Any] = {}
        self._steady: dict[Key, Any] = {}
        self._recording = self._learning = False
        self._unkept: set[str] = set()  # that turned out to be state late, and cannot be kept
        self._tables = ModuleTables()
        self._hooks = HookLog(self._tables.see_hooks)
        self._undo: list[Any] = []
        self._modes: ModeWatcher | None = None
        self.assigned_buffers = 0  # how often a buffer was assigned

    def install(self, modes: ModeWatcher | None = None) -> None:
        """Log what is assigned to these modules from now on; `modes` is called before train() or eval() of one."""
        self._modes = modes
        self._find_modules()
        self._tables.watch(self._inner, self._find_modules)
        log = self
        assign, delete = nn.Module.__setattr__, nn.Module.__delattr__

        @not_compiled
        @functools.wraps(assign)
        def logged_assign(self: nn.Module, name: str, value: Any) -> None:
            if id(self) in log._paths:
                log._note(self, name, value)
            assign(self, name, value)

        @not_compiled
        @functools.wraps(delete)
        def logged_delete(self: nn.Module, name: str) -> None:
            if id(self) in log._paths:
                log._note(self, name)
            delete(self, name)

        nn.Module.__setattr__, nn.Module.__delattr__ = logged_assign, logged_delete  # type: ignore[method-assign]

        def undo() -> None:
            nn.Module.__setattr__, nn.Module.__delattr__ = assign, delete  # type: ignore[method-assign]

        self._undo.append(undo)
        self._hooks.install()

    def remove(self) -> None:
        self._hooks.remove()
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _find_modules(self) -> None:
        """Find all modules that there are; some may have been put there by steps."""
        for owner, module in self._modules.items():
            for path, child in module.named_modules():
                self._paths.setdefault(id(child), (f"{owner}/{path}", child))
        self._inner.update((key, one) for key, one in self._paths.items() if not is_wrapper(one[1]))

    def _note(self, module: nn.Module, name: str, value: Any = _MISSING) -> None:
        """An attribute is about to become `value`, or to be deleted."""
        key = (id(module), name)
        if key in self._before or name in wrapper_attributes(type(module)):
            return
        tables = vars(module)
        holder = next((t for t in (tables, *tables_in(module)) if name in t), None)
        if holder is buffers_in(module):
            if holder[name] is value:
                return  # written in place: `self.n_averaged += 1`
            self.assigned_buffers += 1
        elif name in _OF_STRUCTURE or (holder is not None and holder is not tables):
            self._tables.is_stale = True
        if name == "training" and self._recording and self._modes is not None:
            self._modes.before_mode(module)
        if self._recording:
            self._before[key] = (holder if holder is not None else {}, _MISSING if holder is None else holder[name])
        elif name not in _NO_STATE:
            self._looked_at.discard(key)
            self._steady.pop(key, None)
            if holder is None or holder is tables:  # parameters, buffers and submodules are no attributes
                self._keep(key, self._value(key, _MISSING))  # not undone, but state from now on if it is plain

    def _keep(self, key: Key, before: Any, *, may_be_changed: bool = True) -> None:
        """An attribute is state from now on; it was this object before, which may have been changed in place."""
        if (path := self._path(key)) in self._state:
            return
        self._state[path] = key
        if before is _MISSING:
            self._first[path] = _GONE
        elif plain_bytes(before, in_graphs=True) is not None and not (may_be_changed and is_mutable(before)):
            self._first[path] = pack(before)

    def see_between(self) -> None:
        """Find containers that code between steps has changed in place: they are state from now on."""
        for key, mark in self._steady.items():
            if changed(mark, self._value(key)):
                self._change_in_place.add(key)
                self._state[self._path(key)] = key

    # --- the step under way -------------------------------------------------------------------------------------
    def begin(self, *, learning: bool) -> None:
        """Begin a step. `learning`: find out which containers it changes in place."""
        self._before.clear()
        self._recording, self._learning = True, learning
        self.assigned_buffers += self._tables.begin()
        self._hooks.begin()
        is_view = view_test(module for _, module in self._paths.values())
        values = {key: self._value(key) for key in self._change_in_place}
        self._in_place = {
            key: remember(value, is_part=is_view) for key, value in values.items() if plain_bytes(value) is not None
        }
        self._compared = dict(self._excerpts(is_view)) if learning else self._steady

    def roll_back(self) -> None:
        """Make every attribute and hook what it was when the step began."""
        self._recording = False
        self._hooks.roll_back()
        for (module_id, name), (holder, value) in reversed(self._before.items()):
            own = vars(self._paths[module_id][1])
            if holder is own:
                own[name] = value
            else:
                own.pop(name, None)
        self._before.clear()
        self.assigned_buffers += self._tables.roll_back()
        for (module_id, name), mark in (*self._compared.items(), *self._in_place.items()):
            vars(self._paths[module_id][1])[name] = put_back(mark)
        self._compared, self._in_place = {}, {}

    def notice(self) -> None:
        """Find, in front of the barrier, which of the changed attributes are state.

        Raises UsageError, in the first steps, for one that is and cannot be kept.
        """
        for key, (_, before) in self._before.items():
            if isinstance(before, torch.Tensor) and is_not_kept(
                self._paths[key[0]][1], key[1], before, self._value(key)
            ):
                if self._learning:
                    raise UsageError(describe_not_kept(self._path(key)))
                self._unkept.add(self._path(key))
        for key in [key for key in self._before if key not in self._looked_at]:
            self._looked_at.add(key)
            module, name = self._paths[key[0]][1], key[1]
            if name in _NO_STATE or name not in vars(module):
                continue
            if is_state(module, name, vars(module)[name]):
                self._keep(key, self._before[key][1])
        self._compare_containers()

    def commit(self) -> None:
        """Keep the values that the step assigned."""
        self._hooks.commit()
        if self._compared:
            self._compare_containers()  # also what changed after an early barrier
            moved = self._change_in_place | self._before.keys()
            steady = [key for key in self._compared if key not in moved and self._is_own(key)]
            self._steady = {key: self._compared[key] for key in steady[:_MOST_STEADY]}
            self._compared = {}
        self._before.clear()
        self._recording = False

    def _compare_containers(self) -> None:
        for key, mark in self._compared.items():
            # One that was assigned may be another object now; else it was replaced past `__setattr__`.
            if changed(mark, mark.value if key in self._before else self._value(key)):
                self._change_in_place.add(key)
                self._state[self._path(key)] = key

    def changed(self) -> list[tuple[nn.Module, str]]:
        """Return the attributes that the step under way has changed so far, as modules and names."""
        marks = (*self._compared.items(), *self._in_place.items())
        keys = {**self._before, **dict.fromkeys(key for key, mark in marks if changed(mark, mark.value))}
        return [(self._paths[module_id][1], name) for module_id, name in keys]

    def __len__(self) -> int:
        """Return the number of attributes that the step under way has assigned."""
        return len(self._before)

    def risk(self) -> str:
        """Return the reason why a recovery cannot vouch for equal bits, if some attribute cannot be kept any more."""
        large = (path for path, key in self._state.items() if is_too_large(self._value(key)))
        return next(map(describe_not_kept, sorted({*self._unkept, *large})), "") or self._tables.risk()

    # --- state of this rank alone -------------------------------------------------------------------------------
    @property
    def has_state(self) -> bool:
        return bool(self._state)

    def is_state(self, owner: str, path: str, name: str) -> bool:
        """Return whether steps change this attribute of a module."""
        return f"{owner}/{path}/{name}" in self._state

    def private(self) -> dict[str, Any]:
        """Return the values of all attributes that are state, by their paths; only plain values, and which are gone."""
        values = {path: self._value(key, _GONE) for path, key in sorted(self._state.items())}
        plain = {path: value for path, value in values.items() if plain_bytes(value, in_graphs=True) is not None}
        is_view = view_test(module for _, module in self._paths.values())
        return {path: pack(value) for path, value in plain.items() if not is_view(value)}

    def first(self, paths: Iterable[str]) -> dict[str, Any]:
        """Return the packed values of attributes before any step changed them, where that is known."""
        return {path: self._first[path] for path in paths if path in self._first}

    def adopt(self, tree: Mapping[str, Any]) -> None:
        """Set the attributes to the values that `private` returned."""
        modules, is_view = dict(self._paths.values()), view_test(module for _, module in self._paths.values())
        for path, packed in tree.items():
            owner, name = path.rsplit("/", 1)
            module = modules.get(owner)
            if module is not None:
                key = (id(module), name)
                self._keep(key, self._value(key, _MISSING), may_be_changed=False)
                if isinstance(packed, str) and packed == _GONE:
                    vars(module).pop(name, None)
                    continue
                value = unpack(packed)
                mine = vars(module).get(name)
                # What is a view of a parameter here, and of its own there, must not be written through.
                own = is_mutable(mine) and not is_view(mine)
                vars(module)[name] = put_in_place(mine, value, is_view) if own else value

    def _is_own(self, key: Key) -> bool:
        """Return whether an attribute may be the script's own: torch's modules change none of theirs late."""
        return not (type(self._paths[key[0]][1]).__module__.startswith("torch.") and key[1].startswith("_"))

    def _value(self, key: Key, default: Any = None) -> Any:
        return vars(self._paths[key[0]][1]).get(key[1], default)

    def _path(self, key: Key) -> str:
        return f"{self._paths[key[0]][0]}/{key[1]}"

    def _excerpts(self, is_view: Callable[[Any], bool]) -> Iterator[tuple[Key, Any]]:
        """Small containers among the attributes, as they are now."""
        for module_id, (_, module) in self._paths.items():
            own = OWN_ATTRIBUTES | wrapper_attributes(type(module))
            for name, value in vars(module).items():
                if name not in own and is_mutable(value) and not is_view(value):
                    size = plain_bytes(value)
                    if size is not None and size <= EXCERPT_BYTES:
                        yield (module_id, name), remember(value, is_part=is_view)
