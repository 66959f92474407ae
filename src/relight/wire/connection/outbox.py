"""Messages that must arrive exactly once though connections break: kept until the other side has confirmed them.

Both ends count the messages of the kinds below, from the first one that one *life* (one run of a process) of the
sender sends to one life of the receiver. A receiver that connects again says how many it has received; the rest is
sent again. A new life on either side counts from 0, and is sent all that no earlier life has confirmed: then a
message may come twice, if the earlier life had no time to confirm it, so every receiver must bear that.
"""

from collections import deque
from collections.abc import Iterator

import msgspec

from relight.core.protocol.commands import Kill, Spawn
from relight.core.protocol.events import HostFaulty, ProcessDying, ProcessExited, ProcessStarted
from relight.wire import messages as msg
from relight.wire.connection.framing import encode_frame

MAX_UNCONFIRMED_BYTES = 64 * 2**20
COUNTED = (
    *(ProcessStarted, ProcessDying, ProcessExited, HostFaulty, msg.FromWorker, msg.FromWorkers),  # agent to controller
    *(Spawn, Kill, msg.ToWorkers, msg.CopyPrivate, msg.TakePrivate, msg.ForgetProcess),  # controller to agent
    msg.PrivateState,  # from one agent to the other, through the controller
)


class Outbox:
    """One direction between two processes, on the sender's side."""

    def __init__(self, max_bytes: int = MAX_UNCONFIRMED_BYTES) -> None:
        self.overflowed = False  # something was lost: the two sides do not agree any more
        self._max_bytes = max_bytes
        self._confirmed = 0
        self._bytes = 0
        self._waiting: deque[tuple[msgspec.Struct, bytes]] = deque()

    def __iter__(self) -> Iterator[msgspec.Struct]:
        """Yield the messages that are not confirmed yet, oldest first."""
        return (message for message, _ in self._waiting)

    def put(self, message: msgspec.Struct) -> bytes:
        """Keep a message until it is confirmed; returns its frame, to be sent. Raises ProtocolError if too long."""
        frame = encode_frame(message)
        if self._bytes + len(frame) > self._max_bytes:
            self.overflowed = True
        else:
            self._waiting.append((message, frame))
            self._bytes += len(frame)
        return frame

    def confirm(self, received: int) -> None:
        """The other side has received so many in all."""
        while self._confirmed < received and self._waiting:
            _, frame = self._waiting.popleft()
            self._bytes -= len(frame)
            self._confirmed += 1

    def begin_anew(self) -> None:
        """One of the two is a new life: count from 0 again."""
        self._confirmed = 0

    def frames(self) -> tuple[bytes, ...]:
        """All that has to be sent (again) on a new connection."""
        return tuple(frame for _, frame in self._waiting)
