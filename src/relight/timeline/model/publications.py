"""The publications of a job, from the statuses of its publishing processes. Pure."""

from relight.core.account.report import PublishReport
from relight.wire.status import PublishStatus


class Publications:
    """Each process counts for itself; rank 0 publishes, and may have been held by several."""

    def __init__(self) -> None:
        self._by_process: dict[str, PublishStatus] = {}  # the newest of each, the newest of all last

    def add(self, status: PublishStatus) -> None:
        self._by_process.pop(status.process, None)
        self._by_process[status.process] = status

    @property
    def newest(self) -> PublishStatus | None:
        """None: nothing was ever published."""
        return next(reversed(self._by_process.values()), None)

    def report(self) -> PublishReport | None:
        """All of it in one value; None: nothing was ever published."""
        newest = self.newest
        if newest is None:
            return None
        each = self._by_process.values()
        return PublishReport(
            updates=sum(status.updates for status in each),
            updates_bytes=sum(status.updates_bytes for status in each),
            updates_seconds=sum(status.updates_seconds for status in each),
            engines={engine.name: engine.version for engine in newest.engines},
        )
