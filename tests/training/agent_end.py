"""A worker's link whose other end, the agent's, is in the hands of a test."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from relight.core.protocol.events import BitsDoubted, WorkerNotice
from relight.training.connection.link import AgentLink, LinkListener
from relight.wire.connection.framing import decode, encode_frame, make_decoder
from relight.wire.connection.streams import receive_payload
from relight.wire.messages import StoreAdd, StoreRecall, StoreSet, StoreWait, WorkerHello

DEADLINE_SECONDS = 20.0


class AgentEnd:
    """The agent of one worker, `w0`: hears what its link sends, says what the test wants, and dies."""

    def __init__(self, path: Path, listener: LinkListener) -> None:
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.settimeout(DEADLINE_SECONDS)
        self._listening.bind(str(path))
        self._listening.listen()
        self._decoder = make_decoder(
            WorkerHello | StoreSet | StoreWait | StoreAdd | StoreRecall | BitsDoubted | WorkerNotice
        )
        self.pool = ThreadPoolExecutor(2)  # for what the worker does meanwhile
        self.link = AgentLink(str(path), "w0", DEADLINE_SECONDS, listener)
        self._accept()

    def _accept(self) -> None:
        self._connection, _ = self._listening.accept()
        self._connection.settimeout(DEADLINE_SECONDS)
        assert self.heard().process == "w0"

    def heard(self) -> Any:
        """Return the next message of the worker."""
        payload = receive_payload(self._connection)
        assert payload is not None
        return decode(self._decoder, payload)

    def says(self, message: msgspec.Struct) -> None:
        self._connection.sendall(encode_frame(message))

    def dies(self) -> None:
        """End, and be succeeded by another one."""
        self._connection.close()
        self._accept()

    def close(self) -> None:
        self.link.close()
        self._connection.close()
        self._listening.close()
        self.pool.shutdown()
