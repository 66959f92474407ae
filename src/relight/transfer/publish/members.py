"""Engines and sources that are connected to a publisher: welcomed, heard and dismissed. Without updates or torch."""

import contextlib
import itertools
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from relight.errors import ProtocolError
from relight.transfer.io import messages as msg
from relight.transfer.io.channel import Channel
from relight.transfer.plan.division import ShardSpec
from relight.transfer.plan.update.result import SELF

HELLO_SECONDS = 5.0


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that is connected."""

    name: str
    pid: int
    version: int
    generation: int


@dataclass
class Member:
    """An engine or a source process at the other end of a connection."""

    channel: Channel
    name: str = ""
    is_source: bool = False
    hello: Any = None
    held: ShardSpec | None = None  # by a source; None: all
    version: int = -1
    generation: int = 0
    greet_by: float = 0.0
    offered: tuple[int, int] = (0, -1)  # generation and version of the last update that it was asked to join
    ordered_ns: dict[tuple[str, int], int] = field(default_factory=dict)


class Members:
    """All members of a publisher, on its thread, which never blocks. Other threads may iterate, and ask for engines."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        welcome: msg.Welcome,
        descriptors: Sequence[int],
        *,
        heard: Callable[[Member, Any], None],
        came: Callable[[Member], None],
        gone: Callable[[Member, str], None],
        notify: Callable[[str], None],
    ) -> None:
        """Send each member `welcome` and `descriptors` after its greeting.

        `came` is called after a member's greeting, `heard` with each later message, and `gone` with the reason when its
        connection was closed. The data of a registration with `selector` is the function to call.
        """
        self._selector = selector
        self._listener = listener
        self._welcome = welcome
        self._descriptors = descriptors
        self._heard, self._came, self._gone, self._notify = heard, came, gone, notify
        self._by_descriptor: dict[int, Member] = {}
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_descriptor.values()))

    def engines(self) -> list[Member]:
        """Return the engines that have sent their greeting, by name."""
        found = [member for member in self if member.hello is not None and not member.is_source]
        return sorted(found, key=lambda member: member.name)

    def sources(self) -> list[Member]:
        """Return the sources by name, rank-10 after rank-9."""
        found = [member for member in self if member.is_source]
        return sorted(found, key=lambda member: (len(member.name), member.name))

    def find(self, name: str) -> Member | None:
        return next((member for member in self if member.name == name), None)

    def greeting_deadline(self) -> float | None:
        """Return when `expire` must be called at the latest; None: no greeting is awaited."""
        return min((member.greet_by for member in self if member.greet_by), default=None)

    def expire(self, now: float) -> None:
        """Dismiss connections that have not sent a greeting in time."""
        for member in self:
            if member.greet_by and member.greet_by <= now:
                self.dismiss(member, "it did not say who it is")

    def send(self, member: Member, message: msgspec.Struct, descriptors: Iterable[int] = ()) -> None:
        """Post a message; dismiss a member that cannot be reached."""
        try:
            member.channel.post(message, list(descriptors))
        except (OSError, ProtocolError) as error:
            self.dismiss(member, f"it cannot be reached: {error}")
        else:
            self._watch(member)

    def flush(self, descriptor: int) -> None:
        """Send the rest of the messages of a member that reads again."""
        member = self._by_descriptor.get(descriptor)
        if member is None:
            return
        try:
            member.channel.flush()
        except OSError as error:
            self.dismiss(member, f"it cannot be reached: {error}")
        else:
            self._watch(member)

    def dismiss(self, member: Member, why: str) -> None:
        """Close the connection of a member."""
        descriptor = member.channel.fileno()
        if self._by_descriptor.pop(descriptor, None) is None:
            return
        self._selector.unregister(descriptor)
        with contextlib.suppress(OSError, ProtocolError):
            member.channel.post(msg.Dismissed(why=why))  # last words, if they fit
        member.channel.close()
        self._gone(member, why)

    def _accept(self, _: object) -> None:
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return
        try:
            channel = Channel(connection, msg.ToPublisher)
            channel.set_timeout(0.0)  # the loop never blocks
        except (OSError, ProtocolError) as error:
            self._notify(f"refused a connection: {error}")
            connection.close()
            return
        self._by_descriptor[channel.fileno()] = Member(channel, greet_by=time.monotonic() + HELLO_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ, self._read)

    def _read(self, connection: Any) -> None:
        member = self._by_descriptor.get(connection.fileno())
        if member is None:
            return
        try:
            alive = member.channel.pull()
            messages = member.channel.pulled()
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self.dismiss(member, f"its connection failed: {error}")
            return
        for message in messages:
            self._hear(member, message)
        if not alive and member.channel.fileno() in self._by_descriptor:
            self.dismiss(member, "it is gone")

    def _hear(self, member: Member, message: Any) -> None:
        match message:
            case msg.EngineHello() | msg.SourceHello() if member.hello is None:
                self._greet(member, message)
            case msg.EngineHello() | msg.SourceHello():
                self.dismiss(member, "it said twice who it is")
            case _ if member.hello is None:
                self.dismiss(member, "it spoke before it said who it is")
            case _:
                self._heard(member, message)

    def _greet(self, member: Member, hello: msg.EngineHello | msg.SourceHello) -> None:
        if hello.protocol_version != msg.PROTOCOL_VERSION:
            self.dismiss(
                member, f"it speaks version {hello.protocol_version} of the protocol, not {msg.PROTOCOL_VERSION}"
            )
            return
        names = {other.name for other in self} | {SELF}
        name = member.name = hello.name[: msg.MAX_NAME]
        for number in itertools.count(1):
            if member.name not in names:
                break
            member.name = f"{name}@{member.channel.peer_pid}" + (f".{number}" if number > 1 else "")
        member.hello, member.greet_by = hello, 0.0
        if isinstance(hello, msg.SourceHello):
            member.held, member.is_source = hello.held, True
        if isinstance(hello, msg.EngineHello):
            member.version, member.generation = hello.version, hello.generation
        self.send(member, self._welcome, self._descriptors)
        self._came(member)

    def _watch(self, member: Member) -> None:
        """Wait for the member's messages, and for room in its connection if messages are left to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.channel.has_unsent else 0)
        descriptor = member.channel.fileno()
        if self._selector.get_key(descriptor).events != events:
            self._selector.modify(descriptor, events, self._read)
