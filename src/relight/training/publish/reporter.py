"""Reports of publications for people, on a thread of its own: an update runs while the main thread computes."""

import threading
import time

from relight.training.process.runtime import Runtime
from relight.transfer.plan.update.result import Published, UpdateProgress
from relight.transfer.publish.handle import Handle
from relight.transfer.publish.publisher import Publisher
from relight.wire.status import EngineVersion, PublishStatus

STATUS_SECONDS = 0.5  # between two looks at what has changed


class PublishReporter:
    """Sends a status whenever it has changed, and a notice for each failure. Methods are for the main thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._publisher: Publisher | None = None
        self._handle: Handle | None = None
        self._version = -1  # of the update under way, or the last one
        self._begun = 0.0
        self._result = Published(version=-1, generation=0)  # of the last update that is over
        self._updates, self._updates_bytes, self._updates_seconds = 0, 0, 0.0
        self._sent: PublishStatus | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relight-publishing", daemon=True)

    def start(self, publisher: Publisher) -> None:
        """Begin to report, also the engines of this publisher."""
        self._publisher = publisher
        self._thread.start()

    def update_begun(self, handle: Handle, version: int) -> None:
        """An update is under way."""
        self._handle, self._version, self._begun = handle, version, time.monotonic()

    def update_ended(self, result: Published) -> None:
        """Report the engines that the version did not reach, and why."""
        self._result = result
        self._handle = None
        if not result.error:
            self._updates += 1
            self._updates_bytes += result.total_bytes
            self._updates_seconds += result.seconds
        for name, why in sorted(result.dropped.items()):
            self.say(f"version {result.version} did not reach {name}: {why}")
        if result.error:
            self.say(f"version {result.version} was not published: {result.error}")

    def say(self, text: str) -> None:
        """Report a sentence, once for each text."""
        self._runtime.notices.say(f"publish {text}", f"publishing: {text}")

    def close(self) -> None:
        """Send the final status, and end the thread."""
        self._closing.set()
        self._thread.join()
        self._send()

    def _run(self) -> None:
        while not self._closing.wait(STATUS_SECONDS):
            self._send()

    def _send(self) -> None:
        status = self._status()
        if status != self._sent:
            self._sent = status
            self._runtime.link.send(status)

    def _status(self) -> PublishStatus:
        handle, publisher = self._handle, self._publisher
        engines = () if publisher is None else publisher.engines()
        over = None if handle is None else handle.wait(0.0)  # the main thread may not have seen it yet
        under_way = handle is not None and over is None
        progress = handle.progress() if handle is not None and under_way else UpdateProgress()
        result = over or self._result
        return PublishStatus(
            process=self._runtime.process,
            engines=tuple(EngineVersion(name=e.name, pid=e.pid, version=e.version) for e in engines),
            version=self._version,
            moved_bytes=progress.held_bytes,
            total_bytes=progress.total_bytes,
            update_seconds=time.monotonic() - self._begun if under_way else result.seconds,
            updates=self._updates,
            updates_bytes=self._updates_bytes,
            updates_seconds=self._updates_seconds,
            dropped={} if under_way else result.dropped,
            error="" if under_way else result.error,
        )
