"""The position of a rank between two steps, for people and for planned faults."""

from relight.core.protocol.position import Phase
from relight.training.process.runtime import Runtime


def show_position(runtime: Runtime) -> None:
    """Show on the page which step comes next."""
    worker, page = runtime.worker, runtime.page
    page.show_step(worker.version, worker.attempt)
    runtime.faults.step, runtime.faults.attempt = worker.version, worker.attempt
    if page.phase is not Phase.OUTSIDE:
        page.stamp(Phase.OUTSIDE)
