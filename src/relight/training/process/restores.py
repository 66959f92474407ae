"""State on its way from or to other processes: what this process serves, and the clients that fetch."""

from pathlib import Path

from relight.core.protocol.fault import Point
from relight.core.worker.worker import Worker
from relight.training.connection.link import AgentLink
from relight.training.process.faults import Faults
from relight.transfer.restore.client import RestoreClient
from relight.transfer.restore.server import RestoreServer
from relight.transfer.restore.shared_fabric import SpareBuffer
from relight.wire.connection.handshake import read_token
from relight.wire.connection.tls import Tls
from relight.wire.settings import host_address
from relight.wire.status import RestoreStatus


class Restores:
    """Closed with each generation by the link thread."""

    def __init__(
        self, private_dir: Path, process: str, timeout_seconds: float, worker: Worker, faults: Faults, link: AgentLink
    ) -> None:
        self._process = process
        self._timeout_seconds = timeout_seconds
        self._worker = worker
        self._faults = faults
        self._link = link
        self._client: RestoreClient | None = None  # of the recovery under way
        self.token, self.tls = read_token(private_dir), Tls.from_environment()  # for connections between hosts
        self.server = RestoreServer(
            private_dir / f"restore-{process}.sock",
            lambda: faults.strike(Point.RESTORE_SEND),
            host_address=host_address(),
            token=self.token,
            tls=self.tls,
        )

    def fetcher(self, generation: int) -> RestoreClient:
        """Return a client that is cancelled when the generation is closed."""
        client = RestoreClient(
            lambda: self._faults.strike(Point.RESTORE_RECEIVE),
            self._timeout_seconds,
            self.token,
            lambda copied_bytes, total_bytes, seconds: self._tell(generation, copied_bytes, total_bytes, seconds),
            self.tls,
        )
        self._client = client
        if self._worker.newest > generation:  # `close` may have come before there was anything to cancel
            client.cancel()
        return client

    def background_fetcher(self, spare: SpareBuffer) -> RestoreClient:
        """Return a client for what is no part of a recovery. Its user must cancel it (`Orders.at_close`)."""
        return RestoreClient(lambda: None, self._timeout_seconds, self.token, tls=self.tls, spare=spare)

    def cancel(self) -> None:
        """End a fetch that is under way."""
        if (client := self._client) is not None:
            client.cancel()

    def withdraw(self) -> None:
        """Serve nothing of older generations."""
        self.server.withdraw(self._worker.newest)

    def forget(self) -> None:
        """The recovery is over."""
        self._client = None

    def _tell(self, generation: int, copied_bytes: int, total_bytes: int, seconds: float) -> None:
        self._link.send(
            RestoreStatus(
                process=self._process,
                rank=self._worker.rank,
                generation=generation,
                copied_bytes=copied_bytes,
                total_bytes=total_bytes,
                seconds=seconds,
            )
        )
