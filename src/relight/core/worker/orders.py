"""Orders as they arrive, at any time: which are stale, and which closes the generation."""

from typing import TYPE_CHECKING

from relight.core.protocol.commands import Assign, Begin, Release, Restore, Resume, Save, Stop, WindDown
from relight.core.worker.actions import Actions, CloseGeneration

if TYPE_CHECKING:
    from relight.core.worker.worker import Worker

_CLOSE: Actions = (CloseGeneration(),)


def on_stop(worker: "Worker", stop: Stop) -> Actions:
    """Close the generation at once; the main thread follows when it can."""
    if stop.generation <= worker.newest:
        return ()
    worker.newest = stop.generation
    worker.go_alone = stop.alone
    worker.closed = True
    return _CLOSE


def on_assign(worker: "Worker", assign: Assign) -> Actions:
    """Keep the rank for when the main thread asks."""
    worker.newest = max(worker.newest, assign.generation)
    worker.orders[Assign] = assign
    return ()


def on_order(worker: "Worker", order: Begin | Restore | Resume | Save | Release) -> Actions:
    """Keep the order, unless a newer generation was opened since it was given."""
    if order.generation >= worker.newest:
        worker.orders[type(order)] = order
    return ()


def on_wind_down(worker: "Worker", order: WindDown) -> Actions:
    """Say at the next barrier of this generation that all ranks are to pause after the step."""
    worker.wind_down_in = max(worker.wind_down_in, order.generation)
    return ()
