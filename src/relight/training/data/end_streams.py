"""Random streams as the last step of an epoch leaves them, for code between epochs that a replacement runs itself."""

from collections.abc import Mapping
from typing import Any

from relight.training.data import rng

_KEY = "streams of the epoch's end"
_LACKING = "a replacement has run code between epochs without the random streams that its rank had there"


class EndStreams:
    """The global generators at the barrier of an epoch's last step: a part of the private state."""

    def __init__(self) -> None:
        self._drawn = 0  # stands for the streams that were kept last
        self._others: dict[str, Any] | None = None  # of another process

    def capture(self) -> dict[str, Any]:
        """Return them as they are now, for the private state."""
        self._drawn = rng.number()
        return {_KEY: rng.capture()}

    @property
    def have_moved(self) -> bool:
        """True if the script has drawn from them since: a replacement would draw the same again."""
        return rng.number() != self._drawn

    def take(self, private: Mapping[str, Any]) -> None:
        """Keep those of another process, out of its private state, until the code begins."""
        self._others = private.get(_KEY)

    def put_back(self) -> str | None:
        """Go on with those of another process. Returns why equal bits cannot be vouched for."""
        if self._others is None:
            return _LACKING
        rng.put_back(self._others)
        self._drawn, self._others = rng.number(), None
        return None
