"""The publisher's own part as a source: a thread that fills the shared buffers with buckets, or lends these."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from relight.transfer.io.buffers import Buffer
from relight.transfer.plan.update.orders import Write
from relight.transfer.plan.update.result import SELF, Stage
from relight.transfer.publish.publication import Publication


class BucketWriter:
    """Fills or lends buckets one after another, in the order in which they were ordered."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        *,
        written: Callable[[Publication, Stage, int, bool], None],
        failed: Callable[[Publication, str], None],
    ) -> None:
        """`written` is called with the stage and the digest of each bucket, and whether it is elsewhere.

        `failed` is called with an error. Both on its thread.
        """
        self._buffers = buffers
        self._written, self._failed = written, failed
        self._orders: queue.SimpleQueue[tuple[Publication, Write] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="relight-writer", daemon=True)
        self._thread.start()

    def write(self, publication: Publication, order: Write) -> None:
        """Fill this bucket next, unless the update is over by then."""
        self._orders.put((publication, order))

    def close(self) -> None:
        """Return when no buffer is written any more."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._orders.get()) is not None:
            publication, order = task
            if publication.handle.over:
                continue
            start_ns = time.monotonic_ns()
            try:
                digest, is_elsewhere = publication.write(order.bucket, order.buffer, self._buffers[order.buffer].view)
            except Exception as error:  # the update ends with a source's failure, not the publisher
                self._failed(publication, f"{type(error).__name__}: {error}")
                continue
            stage = Stage("broadcast", order.bucket, order.buffer, SELF, start_ns, time.monotonic_ns())
            self._written(publication, stage, digest, is_elsewhere)
