"""Values that an undone step or a replacement cannot get back: what relight tells after a recovery, by their names.

Their changes end no job. In the step that is computed twice, early in each job, they may change twice, which is
reported, too.
"""

import re
import sys
from collections.abc import Callable, Collection
from typing import Any

from relight.training.carried.code.refs import Place, describe
from relight.training.carried.code.source import mentioned
from relight.training.carried.finding.places import Spots
from relight.training.carried.finding.survey import Survey
from relight.training.carried.finding.told.caches import Caches
from relight.training.carried.finding.told.fingerprinted import Fingerprinted
from relight.training.carried.finding.told.libraries import OfLibraries
from relight.training.carried.finding.told.process import OfProcess
from relight.training.state.values.fingerprints import CACHED, is_database
from relight.words import listed

_CACHED = (
    "{names}(): a cached function whose result depends on more than the values of its arguments: random numbers, or "
    "what steps change. It is not undone with a step, and a replacement computes it anew. Call it before the loop, or "
    "keep what it returns in a variable"
)
_KEPT = (
    "{names}(): a cached function, of which an undone step has computed a result that can change, beside older ones. "
    "Make such objects before the loop, or keep them in a variable"
)
_SETTLED = 3
_SELECT = r"(?i)\bselect\b"
_MADE = "{names}: made by a step, and no module that another process imports. Make it before the loop"
_CHANGED = (
    "{names}: changed by steps, and of a kind that is neither undone with a step nor carried to a replacement. Keep "
    "such state in a variable (numbers, lists, tensors), compute it from step.number, or hand over an object with "
    "state_dict() and load_state_dict() (relight.Training(..., per_rank={{...}})). training.carry(ignore=(...,)) says "
    "that it is handed over, or that no step depends on it (docs/CARRIED.md)"
)


class Unrepeatable:
    """Watches cached functions, modules, files, and objects without a state to set, from the beginning of the loop."""

    def __init__(
        self,
        look: Callable[[], Survey],
        is_told_otherwise: Callable[[Place], bool],
        fingerprinted: Fingerprinted,
        spots: Spots,
    ) -> None:
        """Nothing is watched yet.

        Args:
            look: finds what the script can reach.
            is_told_otherwise: of a place that is carried, was left out, or does not matter.
            fingerprinted: the fingerprints of these objects.
            spots: of places, and with the files that steps read.
        """
        self._look, self._is_told_otherwise = look, is_told_otherwise
        self._sighted, self._files = fingerprinted, spots.settings.files
        self._process, self.libraries = OfProcess(), OfLibraries(spots)
        self._looks = 0
        self._caches = self._now = Caches()
        self._script: Collection[str] = ()  # its modules
        self._reads_tables = False
        self._kept: set[str] = set()
        self._modules = {*sys.modules}

    def mentioned(self, pattern: str) -> str:
        """Return FILE:LINE of the first line of the script that a pattern matches; empty: there is none."""
        return mentioned(self._script, pattern)

    def begin(self, survey: Survey, ignored: Collection[str]) -> None:
        """The loop is found. `ignored`: names of what no step depends on, as the script says."""
        self._script = survey.names.keys()
        self._reads_tables = bool(mentioned(self._script, _SELECT))
        self._process.begin(self._script, ignored)
        self.see(survey)
        self._caches = self._now
        self._modules = {*sys.modules}
        self._files.begin(ignored)

    def begin_step(self, *, is_looked_at: bool) -> None:
        """A step begins. `is_looked_at`: all that there is will be seen; else results that are new are looked at."""
        self._files.begin_step()
        if not is_looked_at and self._now.have_grown:
            self.see(self._look())

    def see(self, survey: Survey) -> None:
        """All that can be reached, at the beginning of a step."""
        found = self._found_in(survey)
        self._now = _caches_in(found)
        self._looks += 1  # before the loop, and at the beginning of steps 0, 1, ...
        # A library may make what it needs when it is first used: what it is then, it was.
        self._sighted.see(found, self.libraries.found() if self._looks <= _SETTLED else ())
        self._process.see()

    def roll_back(self) -> None:
        """The step under way is undone: it has computed nothing, as far as it can be helped."""
        self._files.roll_back()
        if self._now.have_grown:
            self._kept.update(_caches_in(self._look().fingerprinted).forget_since(self._now))

    def doubt_of_undone(self) -> str:
        """Return why a step that is computed twice may leave other bits than one that is computed once, or ""."""
        found = self._found_in(self._look())
        return self._told(self._sighted.changed_in_step(found), self._process.changed_in_step())

    def doubt(self, changing: Collection[str]) -> str:
        """Return why equal bits cannot be vouched for, or "". `changing`: names that steps change."""
        found = self._found_in(self._look())
        caches = _caches_in(found)
        if computed := caches.computed_since(self._caches, changing):
            return _CACHED.format(names="(), ".join(computed))
        if self._kept:
            return _KEPT.format(names="(), ".join(sorted(self._kept)))
        more = [*caches.changed_since(self._caches, self._script), *self._process.changed()]
        if changed := self._told(self._sighted.changed(found), more):
            return changed
        new = sorted(name for name in {*sys.modules} - self._modules if "." not in name)
        if made := [name for name in new if _is_made(sys.modules[name])]:
            return _MADE.format(names=", ".join(made))
        return self._files.doubt()

    def forget_results(self) -> None:
        """Forget the results that only a rehearsal has computed."""
        _caches_in(self._look().fingerprinted).forget_since(self._caches)

    def _found_in(self, survey: Survey) -> dict[Place, Any]:
        """Objects that only a fingerprint shows to have changed; databases in files only if the script reads any."""
        found = {**survey.fingerprinted, **self.libraries.found()}
        return found if self._reads_tables else {at: one for at, one in found.items() if not is_database(one)}

    def _told(self, places: Collection[Place], more: Collection[str]) -> str:
        names = {self._shown(place) for place in places if not self._is_told_otherwise(place)}
        return _CHANGED.format(names=listed(sorted({*names, *more}))) if names or more else ""

    def _shown(self, place: Place) -> str:
        """Name an object, with the line that first sets it, or the function."""
        kind, first, second = next((step for step in reversed(place) if step[0] not in ("item", "member")), place[0])
        name = second if kind in ("module", "frame", "held", "shown") else first
        where = mentioned(self._script, rf"\bdef {re.escape(name)}\b|\b{re.escape(name)}\b\s*(:[^=]*)?=(?!=)")
        return f"{describe(place)} ({where})" if where else describe(place)


def _caches_in(found: dict[Place, Any]) -> Caches:
    return Caches((describe(place), one) for place, one in found.items() if type(one) is CACHED)


def _is_made(module: Any) -> bool:
    return getattr(module, "__spec__", None) is None and getattr(module, "__file__", None) is None
