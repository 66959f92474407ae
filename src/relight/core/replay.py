"""What a controller knew when it died, worked out anew from what it had been told."""

from collections.abc import Callable, Iterable

import msgspec

from relight.core.controller import Controller, ControllerSettings
from relight.core.events import Event


class Record(msgspec.Struct, frozen=True):
    """One thing that a controller was told, as its journal has it."""

    now: float
    event: Event | None  # None: that its deadline has passed


def replay(
    settings: ControllerSettings,
    records: Iterable[Record],
    kind: Callable[[ControllerSettings], Controller] = Controller,
) -> Controller:
    """A controller that was told the same at the same times: it has taken the same decisions.

    Its orders are thrown away: some of them have been carried out, and which ones the journal does not say. Tell it
    `ControllerRestarted` next; it then gives those again that still hold.
    """
    controller = kind(settings)
    for record in records:
        if record.event is None:
            controller.expire(record.now)
        else:
            controller.handle(record.event, record.now)
    return controller
