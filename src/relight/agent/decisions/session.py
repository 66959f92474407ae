"""The agent's side of the conversation with controllers, whichever connection and whichever controller it is."""

from collections.abc import Mapping

import msgspec

from relight.core.protocol.events import ProcessExited
from relight.wire.connection.framing import encode_frame
from relight.wire.connection.outbox import COUNTED, Outbox
from relight.wire.messages import PROTOCOL_VERSION, Hello, Received, Welcome


class Session:
    """Counts messages in both directions, so that each arrives once (wire/connection/outbox.py)."""

    def __init__(
        self,
        name: str,
        slots: int,
        life: str,
        patience_seconds: float,
        *,
        spare: bool = False,
        machine: str = "",
        versions: Mapping[str, str] = {},
    ) -> None:
        """`life` names this run of the agent. `patience_seconds`: how long it lives without a controller.

        `spare`: its host is none of the nodes that the job starts on. `machine`: the cluster's name for that.
        `versions`: of what its workers run.
        """
        self._name = name
        self._slots = slots
        self._spare = spare
        self._machine = machine
        self._versions = dict(versions)
        self._life = life
        self._patience_seconds = patience_seconds
        self._controller_life = ""
        self._received = 0  # counted messages of that controller
        self._unconfirmed = False
        self._outbox = Outbox()

    def hello(self, live: tuple[str, ...]) -> Hello:
        """Introduce the agent. Processes whose end is still to be reported count as present: the report comes next."""
        unreported = {message.process for message in self._outbox if isinstance(message, ProcessExited)}
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            role="agent",
            name=self._name,
            mac=b"",
            slots=self._slots,
            spare=self._spare,
            machine=self._machine,
            versions=self._versions,
            processes=tuple(sorted({*unreported, *live})),
            life=self._life,
            controller=self._controller_life,
            received=self._received,
        )

    def begin(self, welcome: Welcome) -> tuple[bytes, ...]:
        """Continue where the last connection ended, or begin with another controller; return the frames to send."""
        if welcome.life != self._controller_life:
            self._controller_life, self._received = welcome.life, 0
            self._outbox.begin_anew()
        self._outbox.confirm(welcome.received)
        return self._outbox.frames()

    def why_given_up(self, evidence: str, waited_seconds: float, *, refused: bool) -> str:
        """Return why no further attempt to connect is made after this one failed, or an empty string.

        A controller that refuses the agent's first Hello will refuse all; a later refusal may be a passing one.
        """
        if refused and not self._controller_life:
            return evidence
        if self._outbox.overflowed:
            return f"{evidence}; more has happened meanwhile than can be kept for it"
        if waited_seconds > self._patience_seconds:
            return f"{evidence}, for {self._patience_seconds:g} s"
        return ""

    def report(self, message: msgspec.Struct) -> bytes:
        """Keep a message until the controller has confirmed it; return its frame."""
        return self._outbox.put(message)

    def receive(self, message: msgspec.Struct) -> bool:
        """Take in a message of the controller. True: a confirmation is due, now or soon."""
        if isinstance(message, Received):
            self._outbox.confirm(message.count)
        if not isinstance(message, COUNTED):
            return False
        self._received += 1
        self._unconfirmed = True
        return True

    def confirmation(self) -> bytes:
        """Return the frame that confirms all that was received, empty if the controller knows it already."""
        if not self._unconfirmed:
            return b""
        self._unconfirmed = False
        return encode_frame(Received(count=self._received))
