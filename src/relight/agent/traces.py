"""Reports the phases that workers record."""

import time

from relight.agent.connection.session import ControllerSession
from relight.agent.processes.process import Process
from relight.wire.messages import TraceChunk


class TraceReporter:
    """Reports the phases that a worker has recorded in its page."""

    def __init__(self, session: ControllerSession) -> None:
        self._session = session
        self.wanted = True  # by the controller

    def report(self, process: Process) -> None:
        """Report what is new. Without a controller the records wait in the page, as far as it can hold them."""
        if not self.wanted or not self._session.connected:
            return
        records = process.page.drain_trace()
        if records:
            rank = process.page.position().rank
            offset_ns = time.time_ns() - time.monotonic_ns()
            self._session.mention(
                TraceChunk(process=process.name, rank=rank, records=records, clock_offset_ns=offset_ns)
            )
