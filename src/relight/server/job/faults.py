"""The controller's own death at an exact place, for tests: RELIGHT_CONTROLLER_FAULTS="sent Restore 1; event Stopped 2".

One entry for each life of the controller, the first one first; a dash spares that life. Places:

    event KIND N    the N-th event of this kind is in the journal, and nothing has come of it yet
    orders KIND N   the orders among which the N-th of this kind is are in the journal, and none of them is sent
    sent KIND N     the N-th order of this kind has just been sent
"""

import os
import signal
from collections import Counter

import msgspec

ENVIRONMENT = "RELIGHT_CONTROLLER_FAULTS"


class ControllerFault:
    """The planned end of one life; without a plan a look costs one attribute test."""

    def __init__(self, life: int) -> None:
        plan = [entry.split() for entry in os.environ.get(ENVIRONMENT, "").split(";")]
        entry = plan[life] if life < len(plan) else []
        self._planned = (entry[0], entry[1], int(entry[2])) if len(entry) == 3 else None
        self._seen: Counter[tuple[str, str]] = Counter()

    def pass_by(self, place: str, message: msgspec.Struct) -> None:
        """This process ends here, as by `kill -9`, if that was planned."""
        if self._planned is None:
            return
        kind = type(message).__name__
        self._seen[place, kind] += 1
        if (place, kind, self._seen[place, kind]) == self._planned:
            os.kill(os.getpid(), signal.SIGKILL)
