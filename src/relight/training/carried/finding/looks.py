"""Marks that a survey leaves at the places it finds: copies, traces that hold no value, or nothing."""

from collections.abc import Callable
from typing import Any, Protocol

from relight.training.state.values.contents import Digests
from relight.training.state.values.kinds import base_of, blocks_in, items_of, kind_of, members_in
from relight.training.state.values.marks import Mark, remember

_LONGEST = 5000  # items of a container that is copied
_BYTES = 4 * 2**20  # of a tensor or an array that is copied
_MOST_BYTES = 2**28  # copied by one survey


class Look(Protocol):
    """Marks of one survey."""

    def identity(self, value: Any) -> Any:
        """Mark which object it is: another one may take its place."""
        ...

    def contents(self, value: Any) -> Any:
        """Mark a value with all that it holds."""
        ...

    def members(self, value: Any) -> Any:
        """Mark which keys a dict has, or how many members another container; each of them is looked at by itself."""
        ...

    def whole(self, value: Any) -> Any:
        """Mark a value that is too large, or too far away, for a look at each thing that it holds."""
        ...


class Places:
    """Marks nothing: it only matters which places there are."""

    def identity(self, value: Any) -> None: ...

    def contents(self, value: Any) -> None: ...

    def members(self, value: Any) -> None: ...

    def whole(self, value: Any) -> None: ...


class Copies:
    """Marks by which values are put back; those too large for that are digested, so that their changes are seen."""

    def __init__(self, is_part: Callable[[Any], bool], is_foreign: Callable[[Any], bool]) -> None:
        self._is_part = is_part
        self._digests = Digests(lambda value: is_part(value) or is_foreign(value))
        self._left = _MOST_BYTES  # to be copied

    def identity(self, value: Any) -> Mark:
        return Mark("opaque", value, None)

    def contents(self, value: Any) -> Any:
        kind = kind_of(value)
        if kind == "opaque":
            return self._digests.mark(value)
        if kind in ("list", "tuple", "dict", "set", "deque", "objects") and len(value) > _LONGEST:
            return self._digests.mark(value)
        most = _BYTES if kind in ("tensor", "array") else self._left
        blocks = {id(one): one for one in blocks_in(value, ("tensor", "array")) if not self._is_part(one)}
        nbytes = sum(one.nbytes for one in blocks.values())
        if nbytes > min(most, self._left):
            return self._digests.mark(value)
        self._left -= nbytes
        return remember(value, is_part=self._is_part)

    def members(self, value: Any) -> Mark:
        kind = kind_of(value)
        return Mark("members", value, list(items_of(value) if kind == "dict" else members_in(kind, value)))

    def whole(self, value: Any) -> Mark:
        return self._digests.mark(value)


class Traces:
    """Marks to be compared with those of a later survey in this process. They hold no value."""

    def __init__(self, is_part: Callable[[Any], bool], is_foreign: Callable[[Any], bool]) -> None:
        self._digests = Digests(lambda value: is_part(value) or is_foreign(value))

    @property
    def is_incomplete(self) -> bool:
        """True if some of the values did not fit."""
        return self._digests.is_full

    def identity(self, value: Any) -> int:
        return id(value)

    def contents(self, value: Any) -> int:
        return self._digests.of(value)

    def members(self, value: Any) -> Any:
        kind = kind_of(value)
        keys = [key for key, _ in items_of(value)] if kind == "dict" else base_of(value).__len__(value)
        return id(value), keys

    def whole(self, value: Any) -> int:
        return self._digests.of(value)
