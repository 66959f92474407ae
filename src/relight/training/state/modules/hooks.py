"""Hooks that a step registers or removes are as they were, once the step is undone.

A script that registers a hook, runs the model and removes the hook again was interrupted in between: repeated, it would
run with two. All of torch's own ways to register one give a `RemovableHandle`, which is watched while a loop runs.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from relight.training.torch_private.autograd import not_compiled

# These keep hooks of their own from step to step, and put them back themselves, or relight does.
_OTHERS = ("relight.", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch._functorch", "torch.fx")


def hook_name(hook: Any) -> str:
    """MODULE:NAME of a hook that is the script's, or of a library's; empty: torch or relight looks after it."""
    function = getattr(hook, "__func__", hook)
    home = getattr(function, "__module__", None) or type(hook).__module__
    if home.startswith(_OTHERS):
        return ""
    return f"{home}:{getattr(function, '__qualname__', type(hook).__qualname__)}"


class HookLog:
    """Logs the hooks that the step under way registers and removes."""

    def __init__(self, seen: Callable[[Any], None]) -> None:
        """`seen` is called with each table that gets a hook, or loses one."""
        self._seen = seen
        self._undo: list[Callable[[], None]] = []  # what the step did, the newest last
        self._recording = False
        self._restore: Callable[[], None] | None = None

    def install(self) -> None:
        """Watch every handle from now on."""
        log = self
        make, take_away = RemovableHandle.__init__, RemovableHandle.remove

        @not_compiled
        def logged_make(self: RemovableHandle, hooks_dict: Any, *, extra_dict: Any = None) -> None:
            make(self, hooks_dict, extra_dict=extra_dict)
            log._seen(hooks_dict)
            if log._recording:
                log._undo.append(lambda: _forget(self, take_away))

        @not_compiled
        def logged_remove(self: RemovableHandle) -> None:
            log._seen(self.hooks_dict_ref())
            if log._recording:
                log._note_removal(self)
            take_away(self)

        RemovableHandle.__init__, RemovableHandle.remove = logged_make, logged_remove  # type: ignore[method-assign]

        def restore() -> None:
            RemovableHandle.__init__, RemovableHandle.remove = make, take_away  # type: ignore[method-assign]

        self._restore = restore

    def remove(self) -> None:
        """Watch no more."""
        if self._restore is not None:
            self._restore()
            self._restore = None

    def begin(self) -> None:
        """Begin a step."""
        self._undo.clear()
        self._recording = True

    def commit(self) -> None:
        """Keep the hooks that the step registered."""
        self._undo.clear()
        self._recording = False

    def roll_back(self) -> None:
        """Put every hook where it was when the step began."""
        self._recording = False
        while self._undo:
            self._undo.pop()()

    def _note_removal(self, handle: RemovableHandle) -> None:
        hooks = handle.hooks_dict_ref()
        if hooks is None or handle.id not in hooks or not hook_name(hooks[handle.id]):
            return
        tables = [(hooks, dict(hooks))]
        for reference in handle.extra_dict_ref:
            extra = reference()
            if extra is not None and handle.id in extra:
                tables.append((extra, dict(extra)))

        def put_back() -> None:
            for table, before in tables:
                table.clear()
                table.update(before)

        self._undo.append(put_back)


def _forget(handle: RemovableHandle, take_away: Callable[[RemovableHandle], None]) -> None:
    hooks = handle.hooks_dict_ref()
    if hooks is not None and handle.id in hooks and hook_name(hooks[handle.id]):
        take_away(handle)
