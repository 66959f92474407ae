"""Attributes of modules on all ranks: equal everywhere, or each rank's own.

The attributes of a lost rank are those of another one where they are equal everywhere: code after its last block may
have changed them, and has run there. Where they differ, they are what the lost rank kept at its last barrier,
and what they were at first if no step had changed them there.
`LateChanges` tells whether that is out of date, for these and for all else that a rank has for itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash

from relight.training.state.modules.attributes import AttributeLog
from relight.training.state.values.late import changed_likewise
from relight.transfer.io.codec import decode_tree, encode_tree

_MOVED = (
    "{names}: an attribute of a module that differs from rank to rank, changed after the block, and a rank was "
    "restored from a copy made before that. Change it inside `with step`"
)
_GUESSED = (
    "attributes of modules differ from rank to rank, and a rank was lost before that showed: its replacement has those "
    "of another rank. Change them inside `with step`"
)


class LateChanges:
    """Names of state of this rank alone that code between two steps changes, by the newest such code and by earlier."""

    def __init__(self) -> None:
        self.newest: list[str] = []  # by the newest code between two steps, here or where the state was copied
        self._before: set[str] = set()
        self._version = -1  # before whose step the newest code ran

    def see(self, version: int, names: Iterable[str]) -> None:
        """The loop asks for step `version`, also a second time after a recovery: the code before it changed these."""
        if version != self._version:
            self._before.update(self.newest)
            self.newest, self._version = [], version
        self.newest = sorted({*self.newest, *names})

    @property
    def all(self) -> list[str]:
        """Names that any such code has changed so far."""
        return sorted({*self._before, *self.newest})

    def describe(self) -> dict[str, Any]:
        """Return the names for a copy of the state."""
        return {"version": self._version, "newest": self.newest, "before": sorted(self._before)}

    def adopt(self, described: Mapping[str, Any]) -> None:
        """Take on what `describe` returned where the state was copied."""
        self._version, self.newest = described["version"], described["newest"]
        self._before = set(described["before"])

    def lost(self, late: Sequence[str] | None) -> list[str]:
        """Return what the code after the last block of a lost rank may have changed there, for good.

        Args:
            late: what such code had changed on that rank before its last barrier; None: it was kept again after that
                code. Where the state was copied, the code has run, and tells whether it changed anything this time.
        """
        if late is None:
            return []
        here, others = set(self.newest), set(late)
        return sorted((here & others) | (here - self._before) | (others - here - self._before))


class RankAttributes:
    """Compares attributes between ranks, and gives a replacement those of the rank that it replaces."""

    def __init__(self, log: AttributeLog) -> None:
        self._log = log
        self.differ = False  # between ranks, once seen
        self.late_changes = LateChanges()
        self.is_a_guess = False  # some were taken from another rank, and may have differed there
        self._kept: dict[str, Any] = {}  # values at the newest barrier
        self._encoded = _NOTHING
        self._before: tuple[dict[str, Any], bytes] | None = None  # the same before the barrier of the step under way
        self._has_begun = False  # with the values of another process, and has been at no barrier since
        self._copied: dict[str, Any] = {}  # values of another rank, until those of the lost one come
        self._copied_before: dict[str, Any] = {}  # what they were before the newest code between steps changed them

    # --- a step -------------------------------------------------------------------------------------------------
    def see_code(self, version: int) -> bool:
        """The loop asks for step `version`: return whether code before it changed what each rank has for itself."""
        self._before = None
        if not self._has_begun:
            self.late_changes.see(version, self._moved_since())
        return self.differ and bool(self.late_changes.newest)

    def number(self) -> int:
        """Return the number that stands for the values in an all-reduce; 0 if there are none."""
        self._before, self._has_begun = self._before or (self._kept, self._encoded), False
        if not self._log.has_state:
            self._kept, self._encoded = {}, _NOTHING
            return 0
        self._kept = self._log.private()
        self._encoded = _encode(self._kept)
        return xxhash.xxh3_64_intdigest(self._encoded) >> 20 | 1

    def compare(self, own: int, total: int, ranks: int) -> str | None:
        """Take the sum of all ranks' numbers at a barrier, to see whether the values are equal everywhere.

        Returns why equal bits cannot be vouched for, if they are not and this rank has values of another one.
        """
        self.differ |= total != ranks * own
        return _GUESSED if self.is_a_guess and self.differ else None

    def roll_back(self) -> None:
        """The step under way is undone: what was kept at its barrier is not that of the newest step."""
        if self._before is not None:
            (self._kept, self._encoded), self._before = self._before, None

    def _moved_since(self) -> list[str]:
        """Return paths of those that have changed since the barrier of the newest step."""
        self._log.see_between()
        if not self._log.has_state or _encode(now := self._log.private()) == self._encoded:
            return []
        return [
            path for path, value in now.items() if path not in self._kept or _encode(value) != _encode(self._kept[path])
        ]

    # --- copies -------------------------------------------------------------------------------------------------
    def describe(self) -> dict[str, Any]:
        """Return them for a copy of the state, with what is known of other ranks' and of code between steps."""
        values, newest = _encode(self._log.private()).hex(), self.late_changes.newest
        before = _encode({path: self._kept[path] for path in newest if path in self._kept}).hex()
        late = self.late_changes.describe()
        return {"values": values, "before": before, "differ": self.differ, "late_changes": late}

    def adopt_copy(self, described: Mapping[str, Any]) -> None:
        """Take on what `describe` returned where the state was copied, for a rank whose own attributes are lost."""
        self.differ, self._has_begun = described["differ"], True
        self.late_changes.adopt(described["late_changes"])
        self._copied = decode_tree(bytes.fromhex(described["values"]))
        self._copied_before = decode_tree(bytes.fromhex(described["before"])) if "before" in described else {}
        self._log.adopt(self._copied)

    def take_over(self, tree: Mapping[str, Any], *, guessed: bool = False, is_late: bool = True) -> None:
        """Take on the values of the rank that this process replaces, after `adopt_copy` of another rank's.

        Args:
            tree: these values.
            guessed: whether what was lost had itself begun with values of another rank.
            is_late: whether code between two steps may have changed them since they were kept.
        """
        others, self._copied = self._copied, {}
        if self.differ:
            first = self._log.first(others.keys() - tree.keys() - {*self.late_changes.newest})  # no step changed them
            self.is_a_guess = not {*others, *self.late_changes.newest} <= first.keys() | tree.keys()
            newest = {*self.late_changes.newest} if is_late else set()
            both = newest & tree.keys() & self._copied_before.keys() & others.keys()
            newer = {path: changed_likewise(tree[path], self._copied_before[path], others[path]) for path in both}
            self._log.adopt({**first, **tree, **newer})
        else:
            self.is_a_guess = any(
                path not in tree or _encode(tree[path]) != _encode(value) for path, value in others.items()
            )
            self._log.adopt({path: value for path, value in tree.items() if path not in others})
        self.is_a_guess |= guessed

    def lost(self, late: Sequence[str] | None) -> str | None:
        """Return why equal bits cannot be vouched for, if code after the last block of the lost rank changed some.

        Args:
            late: see `LateChanges.lost`.
        """
        names = self.late_changes.lost(late) if self.differ else []
        return _MOVED.format(names=", ".join(names)) if names else None


def _encode(value: Any) -> bytes:
    return encode_tree(value, "attributes")


_NOTHING = _encode({})
