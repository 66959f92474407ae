"""Values that are carried, as the successor of a rank puts them in where they were."""

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from relight.errors import UsageError
from relight.training.carried.code.refs import describe
from relight.training.carried.ends import Ends
from relight.training.carried.finding.catalog import Catalog
from relight.training.carried.finding.compare import last_compared_by_all
from relight.training.carried.finding.kept import NEVER, UNSETTLED
from relight.training.carried.finding.places import place_of
from relight.training.carried.finding.spots.files import ASKED_FOR_KEY, FOUND_AGAIN, NOT_MADE
from relight.training.carried.finding.spots.spot import MISSING
from relight.training.carried.values.trees.reader import Reader
from relight.training.carried.values.trees.words import MISSING_TREE, Unsupported

_NOT_HERE = (
    "{name}: carried by the script, and this process cannot get it: {what}. Make what it stands for before "
    "relight.Training(...), so that each process of the job has it from its start"
)
_LOST = (
    "{names}: goes on from step to step, cannot be carried, and a rank goes on without it. If no step depends on it: "
    "training.carry(ignore=(...,))"
)
_LATER = (
    "{names}: first seen to change after the version to which the job returned, and not put back to what they were. "
    "If a step depends on it: training.carry(...); else training.carry(ignore=(...,))"
)
_LACKING = (
    "{names}: changed after the last write of a step, in some steps at least, and a rank was restored from a copy made "
    "before that: it lacks what that step may have changed. Change them before the write; values that are only shown "
    "survive with step.report(...) and training.log_to(...)"
)
_TAKEN = (
    "{names}: changed after the last write of a step, in some steps at least, and a rank was restored from a copy made "
    "before that. Another rank had the same values then, and gave those that it has now: right if that code "
    "does the same on all ranks. Change them inside `with step`, before the write"
)


class Adoption:
    """Puts values of another process into the places of this one, once its loop asks for a step."""

    def __init__(self, catalog: Catalog, ends: Ends) -> None:
        self._catalog = catalog
        self._ends = ends
        self._pending: dict[str, Any] | None = None
        self._taken: dict[str, Any] = {}  # trees of another rank's values, newer than those that are pending
        self._ownerless: list[str] = []
        self._moving: list[str] = []  # keys of what is only shown, and was seen elsewhere to move on after it was kept

    @property
    def is_pending(self) -> bool:
        """True if values wait to be put in."""
        return self._pending is not None

    def adopt(
        self,
        tree: dict[str, Any] | None,
        noticed: Mapping[str, int],
        version: int,
        taken: dict[str, Any],
        in_part: dict[str, Any],
    ) -> str | None:
        """Values to be put in at the next turn; see `Carried.adopt`. `taken`, `in_part`: newer trees of some of them.

        Returns why equal bits cannot be vouched for.
        """
        self._catalog.unrepeatable.forget_results()
        self._pending, self._taken = tree or None, {**taken, **in_part}
        self._moving = [key for key, number in noticed.items() if number < 0]
        known = {*tree["names"], *tree["of_calls"]} if tree else set()
        last = last_compared_by_all(version)
        if unknown := [key for key, number in noticed.items() if last < number < version and key not in known]:
            return (
                f"{_described(unknown)}: changed by the script in a way that its code does not show, and seen on one "
                "rank before another was lost that had not looked. If a step depends on it: training.carry(...); else "
                "training.carry(ignore=(...,))"
            )
        if self._catalog.comparison.number > version:  # this process goes back, and replaces no other
            late = [key for key, one in self._catalog.kept.items() if one.seen and one.is_written and key not in known]
            if late:
                return _LATER.format(names=_described(late))
        if not tree:
            return None
        if lost := tree.get("lost"):
            return _LOST.format(names=_described(lost))
        if left := [key for key in tree["unsettled"] if key not in taken]:
            of_files = FOUND_AGAIN if tree.get("runs_code") else NOT_MADE
            return of_files if left == [ASKED_FOR_KEY] else UNSETTLED.format(names=_described(left))
        if left := [key for key in tree["lacking"] if key not in taken]:
            return _LACKING.format(names=_described(left))
        return _TAKEN.format(names=_described([*taken])) if taken else None

    def look_for_loop(self, frame: FrameType) -> None:
        """Look at the loop's frame before the loop is found in this process."""
        assert self._pending is not None
        self._catalog.loop.look_for(frame, *self._pending["loop"])

    def put_in(self) -> list[str]:
        """Give the places their values. Returns the names of places that are in no object of this process."""
        tree, self._pending, self._ownerless = self._pending, None, []
        assert tree is not None
        self._put_in_all(tree["names"])
        for key, part in self._taken.items():
            self._put_in_all({key: part})
        self._taken = {}
        if self._catalog.loop.is_found:
            self._put_in_all(tree["of_calls"])
        elif tree["of_calls"]:
            self._pending = {**tree, "names": {}}  # once the block is entered
        if tree.get("runs_code"):
            self._ends.put_in(tree.get("ends", {}))
        for key in self._moving:
            if (one := self._catalog.kept.get(key)) is not None:
                one.moves_on = not one.feeds
        return self._ownerless

    def _put_in_all(self, trees: dict[str, Any]) -> None:
        reader = Reader(self._catalog.homes, self._catalog.parts, self._holder_at)
        for key, part in trees.items():
            one, spot = self._catalog.receive(place_of(key))
            try:
                value = MISSING if part == MISSING_TREE else reader.read(key, part)
            except Unsupported as problem:
                raise UsageError(_NOT_HERE.format(name=describe(place_of(key)), what=problem)) from None
            if one is None:
                continue
            one.kept, one.is_put_in = NEVER, True
            if value is not spot.get():  # else it is kept otherwise there, or left out, or was written in place
                try:
                    spot.set(value)
                except AttributeError:  # one rank alone has the object (`saver = Saver() if rank == 0 else None`)
                    self._ownerless.append(one.name)

    def _holder_at(self, key: str) -> Any:
        spot = self._catalog.loop.spots.find(place_of(key))
        if spot is None or (thing := spot.get()) is MISSING:
            raise Unsupported(f"{describe(place_of(key))}, which this process does not have")
        return thing


def _described(keys: Sequence[str]) -> str:
    return ", ".join(sorted({describe(place_of(key)) for key in keys}))
