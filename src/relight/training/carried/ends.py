"""Values that the last step of an epoch leaves for the code between that and the next one (the loss that it prints).

No later step reads them, so they are not carried. A replacement that runs this code itself needs them all the same.
They are written down with the private state of that step, if they are plain, and put in before the code runs.
"""

from collections.abc import Mapping
from typing import Any

from relight.training.carried.code.refs import describe
from relight.training.carried.finding.catalog import Catalog
from relight.training.carried.finding.places import key_of, place_of
from relight.training.carried.finding.spots.spot import MISSING
from relight.training.carried.values.homes import Homes
from relight.training.carried.values.trees.alone import refers, written_alone
from relight.training.carried.values.trees.reader import Reader
from relight.training.carried.values.trees.sizes import size_of
from relight.training.carried.values.trees.words import Unsupported

_MOST_BYTES = 2**20  # of all of them
_MISSING = (
    "{names}: set by the steps of an epoch and read by the code after them, which a replacement has run without having "
    "got them"
)


class Ends:
    """Finds them by `Loop.needed_between`; None there: the code is not known, or there are no epochs."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lacks: list[str] = []  # that could not be written down last
        self._missing: set[str] | None = None  # of what another process had; None: nothing was put in

    @property
    def lacks(self) -> list[str] | None:
        """Names of which no replacement gets the value; None: not known."""
        needed = self._catalog.loop.needed_between
        return None if needed is None else sorted({*self._lacks, *(describe(one.place) for one in needed if one.late)})

    @property
    def come_late(self) -> bool:
        """True if steps set some after their last write, or what is carried; by the code, as this rank runs it."""
        return self._catalog.loop.ends_late

    def capture(self) -> dict[str, Any]:
        """Return the trees of the values of now, by keys of their places; empty: none is needed."""
        found: dict[str, Any] = {}
        self._lacks, left = [], _MOST_BYTES
        for one in self._catalog.loop.needed_between or ():
            place = self._catalog.loop.lasting(one.place)
            spot = self._catalog.loop.spots.find(place)
            value = MISSING if spot is None else spot.get()
            if value is MISSING:  # no step of this process has set it
                continue
            tree = written_alone(value, self._catalog.parts)
            left -= size_of(tree)
            if left < 0 or refers(tree):
                self._lacks.append(describe(place))
            else:
                found[key_of(place)] = tree
        return found

    def put_in(self, trees: Mapping[str, Any]) -> None:
        """Give their places the values of another process."""
        missing = self._here() - trees.keys()
        for key, tree in trees.items():
            spot = self._catalog.loop.spots.find(place_of(key))
            try:
                value = Reader(Homes(), self._catalog.parts).read("", tree)
            except Unsupported:
                value = MISSING
            if spot is None or value is MISSING:
                missing.add(key)
            else:
                spot.set(value)
        self._missing = missing

    def doubt(self) -> str | None:
        """As this replacement is to run the code: return why equal bits cannot be vouched for."""
        missing, self._missing = self._here() if self._missing is None else self._missing, None
        names = sorted(describe(place_of(key)) for key in missing)
        return _MISSING.format(names=", ".join(names)) if names else None

    def _here(self) -> set[str]:
        return {key_of(self._catalog.loop.lasting(one.place)) for one in self._catalog.loop.needed_between or ()}
