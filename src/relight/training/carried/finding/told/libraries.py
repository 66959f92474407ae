"""Objects of installed libraries that steps use: environments, graphs, estimators. Their state is only looked at."""

from collections.abc import Collection
from typing import Any

from relight.training.carried.code.refs import Place, may_hold_state
from relight.training.carried.finding.places import Spots

_MOST = 64  # in one list


class OfLibraries:
    """Finds them where the code of the loop has named them."""

    def __init__(self, spots: Spots) -> None:
        self._spots = spots
        self._places: Collection[Place] = ()

    def begin(self, places: Collection[Place]) -> None:
        """The loop is found; `places` of such objects, or of lists of them."""
        self._places = places

    def found(self) -> dict[Place, Any]:
        """The objects that are there now, by their places."""
        found: dict[Place, Any] = {}
        for place in self._places:
            spot = self._spots.find(place)
            value: Any = spot.get() if spot is not None else None
            if type(value) in (list, tuple):
                items = enumerate(value[:_MOST])
                found |= {(*place, ("item", "int", str(at))): one for at, one in items if may_hold_state(one)}
            elif may_hold_state(value):
                found[place] = value
        return found
