"""A rank's private state: what it alone has, kept beside its position page for the process that replaces it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from relight.training.carried.carried import Carried
from relight.training.carried.succession import settled_by_code
from relight.training.connection.page import NO_PRIVATE
from relight.training.data.batches import Batches
from relight.training.data.end_streams import EndStreams
from relight.training.process.runtime import Runtime
from relight.training.state.modules.slots import Key
from relight.training.state.tracked import TrackedState
from relight.transfer.io.codec import TensorTable, decode_tree, encode_tree, flatten, joined

# What `NO_PRIVATE` is the bytes of.
_EMPTY, _NONE = flatten({}, ""), flatten(None, "")
_BARE = {"buffers": _EMPTY, "per_rank": _EMPTY, "data": _NONE, "rng": _NONE}


class Reports(Protocol):
    """Values that the script reported in the step under way."""

    @property
    def has_private(self) -> bool: ...

    def private(self) -> dict[str, Any]: ...


class PrivateState:
    """Buffers and objects of one rank, places in its data, random streams, what its script carries, its reports."""

    def __init__(
        self, runtime: Runtime, state: TrackedState, batches: Batches, carried: Carried, reports: Reports
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._batches = batches
        self._carried = carried
        self._reports = reports
        self.streams = EndStreams()
        self._buffers = TensorTable("buffers")
        self._is_moved = False  # by code between two steps, since it was kept
        # Kept at the last two barriers, by version, and code may have changed it since. The last step may be undone.
        self._unsettled: dict[int, bytes] = {}

    def keep(self, version: int, *, early: bool = False, between: bool = False) -> None:
        """As it is now, as that of `version`.

        `early`: the block goes on after this. `between`: it is kept again, after code between two steps, right after
        `is_due`.
        """
        ends_epoch = self._carried.ends_epoch(version)
        carried = self._carried.capture(early=early, ends_epoch=ends_epoch, compared=between)
        is_end = ends_epoch and not between and self._carried.keeper.ends.lacks is not None
        streams = self.streams.capture() if is_end else {}
        is_bare = self._batches.derivable and not (self._reports.has_private or self._state.rank_private.exists)
        if is_bare:
            tree = joined({**_BARE, "carried": carried}) if not streams else {**_BARE, "carried": carried, **streams}
            payload = encode_tree(tree, "rank-private state") if carried or streams else NO_PRIVATE
        else:
            tree = {
                **self._state.rank_private.tree(),
                **self._batches.private(between=between),
                **self._reports.private(),
                **streams,
            }
            tree["buffers"] = self._buffers.look_at(tree["buffers"])
            if carried:
                tree["carried"] = carried
            if not between:
                tree["late"] = self._state.rank_private.late
            payload = encode_tree(tree, "rank-private state")
        if not between:
            is_unsettled = self._carried.keeper.is_unsettled or self._state.rank_private.has_objects
            before = {version - 1: self._unsettled[version - 1]} if version - 1 in self._unsettled else {}
            self._unsettled = {**before, **({version: payload} if is_unsettled else {})}
        self._runtime.page.write_private(version, payload)

    def may_keep_again(self) -> bool:
        """Return whether in the block of a step what the script carries is as it was when the step was asked for."""
        return not self._carried.computes_above

    def see_code(self, version: int, changed: Sequence[Key]) -> None:
        """The loop asks for step `version`, and code before it changed these tensors. Before any recovery there."""
        self._is_moved = self._state.rank_private.see_code(version, changed) or self._is_moved

    def is_due(self, version: int) -> bool:
        """Return whether anything has changed since it was kept as that of `version`, which is now: by code between."""
        needs_keeping = self._carried.needs_keeping
        of_torch, of_script = self._state.settings.moved(), self._carried.moved()
        if (moved := of_script or of_torch) is not None:
            self._runtime.notices.doubt_if_lost_after(version - 1, moved)
        is_moved, self._is_moved = self._is_moved, False
        return is_moved or needs_keeping

    def noticed(self) -> dict[str, int]:
        """Return facts for the replacement of another rank: see `Carried.noticed`."""
        return self._carried.noticed()

    def late_values(self, version: int) -> dict[str, bytes]:
        """Return what code has changed since it was kept as that of `version`: see `late_values.py`."""
        if (payload := self._unsettled.get(version)) is None:
            return {}
        tree = decode_tree(payload)
        kept = self._runtime.page.read_private(version) if self._carried.is_undone else None
        again = decode_tree(kept).get("carried") if kept is not None else None
        of_script = self._carried.keeper.late_values(tree.get("carried"), again)
        return {"late": of_script, "late_objects": self._state.rank_private.late_objects(tree["per_rank"])}

    def adopt(self, tree: dict[str, Any], version: int, meta: Mapping[str, Any] | None = None) -> None:
        """Be that of a predecessor, but for its place in the data: `Batches.take_over` and `restore`.

        `meta`: what describes the state that came with it, from another rank.
        """
        meta = meta or {}
        self._state.rank_private.adopt(tree, meta.get("late_objects", b""))
        kept = tree.get("carried")
        if meta.get("runs_code"):
            kept = settled_by_code(kept) if kept else kept
            self.streams.take(tree)
        carried = self._carried.adopt(kept, meta.get("noticed"), version, meta.get("late", b""))
        doubts = [carried, self._state.rank_private.missed(tree)]
        for doubt in (*doubts, *self._state.rank_private.lost(tree.get("late"))):
            if doubt is not None:
                self._runtime.notices.doubt(doubt, step=version - 1)
