"""One rank's parts of divided weights, lent to the publisher of rank 0, on any host, while they do not change.

Between two writes parameters do not change. From the boundary between two steps to the write of the next one they are
those of a known version: then the publisher may have parts of them written into its buffers, on a thread of this
rank. The write waits until nothing is read any more. Buffers change in between, in forward: they are copied first.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from relight.errors import ProtocolError, TransferError
from relight.transfer.plan.manifest import Manifest
from relight.transfer.plan.plan import Bucket
from relight.transfer.publish.source import SourceLink
from relight.transfer.relay.remote_source import RemoteSourceLink
from relight.transfer.tensors.weights import PartSource
from relight.wire.connection.tls import Tls

RETRY_SECONDS = 0.1


class LentParts:
    """A source (`transfer.source.Source`) and its lease, at the publisher of `place` as long as there is one."""

    def __init__(
        self,
        place: Path,
        find_bridge: Callable[[], str],
        name: str,
        parts: PartSource,
        stall_timeout_seconds: float,
        *,
        token: bytes,
        tls: Tls | None,
    ) -> None:
        """`find_bridge`: where the publisher's host lets in sources of other hosts; empty: nowhere, or it is this host.

        `token` is what proves that they are of this job, and `tls`, if there is any, is spoken with it.
        """
        self._place = place
        self._find_bridge = find_bridge
        self._token, self._tls = token, tls
        self._name = name
        self._parts = parts
        self._frozen = parts  # with copies of the buffers that it holds, as they are of the version
        self._stall_timeout_seconds = stall_timeout_seconds
        self._condition = threading.Condition()
        self._version = -1  # that the parts are of now; -1: they are being written
        self._lent = False  # an update relies on them
        self._filling = False
        self._ending = threading.Event()  # the publisher that there is now is the last one
        self._stopped = False
        self._link: SourceLink | None = None
        self._thread = threading.Thread(target=self._serve, name="relight-lending", daemon=True)
        self._thread.start()

    # --- for the training ---------------------------------------------------------------------------------------
    def hold(self, version: int) -> None:
        """Lend the parts of `version` until the next `before_write`."""
        with self._condition:
            if version != self._version:  # else a step begins again, and an update may be reading
                self._frozen = self._parts.frozen()
            self._version = version
            self._condition.notify_all()

    def before_write(self) -> None:
        """The parts are about to change: wait until they are not read any more, but not for a slow engine."""
        with self._condition:
            self._condition.wait_for(lambda: not self._lent, self._stall_timeout_seconds)
            self._withdraw(f"it kept the training waiting for {self._stall_timeout_seconds:g} s")

    def withdraw(self) -> None:
        """The version is undone."""
        with self._condition:
            self._withdraw("a recovery went back past this version")

    def finish(self, patience_seconds: float) -> None:
        """The version is the last one: go on until the publisher has ended, if there is one."""
        self._ending.set()
        self._thread.join(patience_seconds)
        self.stop()

    def stop(self) -> None:
        """Lend nothing any more."""
        self._stopped = True
        self._ending.set()
        with self._condition:
            self._withdraw("this rank lends its parts no longer")
            self._condition.notify_all()  # the link's thread may wait for a version that does not come
        link = self._link
        if link is not None:
            link.stop()
        self._thread.join()

    def _withdraw(self, why: str) -> None:
        self._version = -1
        if self._lent:
            self._lent = False
            if self._link is not None:
                self._link.withdraw(why)
        # A bucket that is being written is written: that takes no longer than to copy it.
        self._condition.wait_for(lambda: not self._filling)

    # --- for the link, on its thread ----------------------------------------------------------------------------
    @property
    def manifest(self) -> Manifest:
        return self._parts.manifest

    def acquire(self, version: int) -> str:
        """See `SourceLease`. A rank that is still writing the version that is wanted is waited for."""
        with self._condition:
            self._condition.wait_for(lambda: self._version >= version or self._stopped, self._stall_timeout_seconds)
            if self._version != version:
                return f"it holds version {self._version}" if self._version >= 0 else "its weights are being written"
            self._lent = True
            return ""

    def release(self) -> None:
        with self._condition:
            self._lent = False
            self._condition.notify_all()

    def settle(self) -> None:
        """Do nothing: they were settled when they were frozen."""

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        """Raises TransferError if the weights are not lent any more."""
        with self._condition:
            if not self._lent:
                raise TransferError("its weights are being written")
            self._filling = True
        try:
            return self._frozen.fill(bucket, view)
        finally:
            with self._condition:
                self._filling = False
                self._condition.notify_all()

    def _serve(self) -> None:
        while not self._stopped:
            if not self._run(self._local_link()) and not self._run(self._remote_link()) and self._ending.is_set():
                return
            self._ending.wait(RETRY_SECONDS)

    def _local_link(self) -> SourceLink:
        return SourceLink(self._place, self, lease=self, held=self._parts.held, name=self._name)

    def _remote_link(self) -> SourceLink | None:
        endpoint = self._find_bridge()
        if not endpoint:
            return None
        return RemoteSourceLink(
            endpoint, self, lease=self, held=self._parts.held, name=self._name, token=self._token, tls=self._tls
        )

    def _run(self, link: SourceLink | None) -> bool:
        """Serve until the publisher ends the connection. False: there is no publisher."""
        self._link = link
        if link is None or self._stopped:
            return False
        try:
            link.run()
        except TransferError:
            return False
        except ProtocolError:
            pass
        return True
