"""A journal's record of what a controller took in."""

import msgspec

from relight.core.protocol.events import Event


class Record(msgspec.Struct, frozen=True):
    """One event, or the passing of a deadline, as the journal has it."""

    now: float
    event: Event | None  # None: that its deadline has passed
