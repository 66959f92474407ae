"""A dead controller's knowledge, worked out again from the events in its journal."""

from collections.abc import Callable, Iterable

from relight.core.controller import Controller, ControllerSettings
from relight.core.protocol.record import Record


def replay(
    settings: ControllerSettings,
    records: Iterable[Record],
    kind: Callable[[ControllerSettings], Controller] = Controller,
) -> Controller:
    """Give a new controller the same events at the same times, so that it takes the same decisions.

    Its orders are thrown away: some of them were carried out, and the journal does not say which. Let it handle
    `ControllerRestarted` next: it then gives the orders again that still hold.
    """
    controller = kind(settings)
    for record in records:
        if record.event is None:
            controller.expire(record.now)
        else:
            controller.handle(record.event, record.now)
    return controller
