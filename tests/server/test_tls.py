"""A controller that speaks TLS: who gets in, and what everybody else is told, at once."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relight.agent.connection.controller_connection import ControllerConnection
from relight.errors import ProtocolError
from relight.wire.connection.framing import make_decoder
from relight.wire.connection.tls import Tls, TlsFiles
from relight.wire.messages import PROTOCOL_VERSION, Hello, NoticeUpdate, ObserverDown, StartTls, StatusUpdate, Welcome
from tests.certificates import Authority
from tests.server.controller_process import ControllerProcess, Peer

Start = Callable[..., ControllerProcess]
DEADLINE_SECONDS = 20.0
AT_ONCE_SECONDS = 4.0  # less than the handshake's own deadline on either side
HOST = "127.0.0.1"
_decoder = make_decoder(ObserverDown)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    return authority.issue("controller", HOST)


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory, files: TlsFiles) -> Iterator[ControllerProcess]:
    """One for all: no test here may disturb it."""
    started = ControllerProcess(tmp_path_factory.mktemp("controller"), world_size=2, tls=files)
    try:
        yield started
    finally:
        started.close()


@pytest.fixture
def quiet(start: Start, files: TlsFiles) -> ControllerProcess:
    """One that has refused no peer yet: it tells of five refusals in a second, and no more."""
    return start(world_size=2, tls=files)


async def connect(
    controller: ControllerProcess, tls: TlsFiles | None, **options: Any
) -> tuple[ControllerConnection, Welcome]:
    hello = Hello(protocol_version=PROTOCOL_VERSION, role="observer", name="someone", mac=b"")
    return await ControllerConnection.connect(
        controller.address,
        options.pop("token", controller.token),
        hello,
        tls=None if tls is None else Tls(tls),
        decoder=_decoder,
        **options,
    )


async def hear(controller_connection: ControllerConnection, kind: type, text: str = "") -> Any:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            message = await controller_connection.receive()
            assert message is not None
            if isinstance(message, kind) and text in getattr(message, "text", ""):
                return message


def told(controller: ControllerProcess, tls: TlsFiles | None, **options: Any) -> str:
    """The reason that a refused peer gets; soon, and from relight."""
    begun = time.monotonic()
    with pytest.raises(ProtocolError) as raised:
        asyncio.run(connect(controller, tls, **options))
    assert time.monotonic() - begun < AT_ONCE_SECONDS
    assert controller.process.poll() is None
    return str(raised.value)


def check_refused(controller: ControllerProcess, bystander_tls: TlsFiles, tls: TlsFiles | None, reason: str) -> str:
    """The peer is refused, a bystander hears `reason` and goes on; returns what the peer was told."""

    async def both() -> str:
        bystander, _ = await connect(controller, bystander_tls)
        with pytest.raises(ProtocolError) as raised:
            await connect(controller, tls)
        await hear(bystander, NoticeUpdate, reason)
        await hear(bystander, StatusUpdate)
        bystander.abort()
        return str(raised.value)

    return asyncio.run(both())


def test_a_peer_with_a_certificate_and_the_token_is_welcome(controller: ControllerProcess, files: TlsFiles) -> None:
    async def talk() -> None:
        controller_connection, welcome = await connect(controller, files)
        assert welcome.job == "test"
        connection: ssl.SSLObject = controller_connection.writer.get_extra_info("ssl_object")
        assert connection.version() == "TLSv1.3"
        await hear(controller_connection, StatusUpdate)
        controller_connection.abort()

    asyncio.run(talk())


def test_a_certificate_is_not_enough(controller: ControllerProcess, files: TlsFiles) -> None:
    assert "does not know this job's token" in told(controller, files, token=bytes(32))


def test_the_controller_of_another_authority(controller: ControllerProcess, tmp_path: Path) -> None:
    said = told(controller, Authority(tmp_path).issue("peer", HOST))
    assert "its certificate is not signed by the authority in --tls-ca: give all hosts the same authority" in said


def test_a_controller_of_another_name(controller: ControllerProcess, files: TlsFiles) -> None:
    said = told(controller, files, server_name="node0.example")
    assert "certificate is not valid for 'node0.example'" in said


def test_a_controller_whose_certificate_has_expired(start: Start, authority: Authority, files: TlsFiles) -> None:
    controller = start(world_size=2, tls=authority.issue("expired", HOST, expired=True))
    assert "its certificate has expired: renew it" in told(controller, files)


def test_a_peer_of_another_authority(
    quiet: ControllerProcess, files: TlsFiles, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path).issue("peer", HOST, authority=authority)
    said = check_refused(quiet, files, stranger, "the peer's certificate is not signed by the authority")
    assert "does not accept the certificate of this one" in said


def test_a_peer_whose_certificate_has_expired(quiet: ControllerProcess, files: TlsFiles, authority: Authority) -> None:
    stranger = authority.issue("late", HOST, expired=True)
    said = check_refused(quiet, files, stranger, "the peer's certificate has expired: renew it")
    assert "does not accept the certificate of this one" in said


def test_a_peer_without_a_certificate(quiet: ControllerProcess, files: TlsFiles) -> None:
    context = ssl.create_default_context(cafile=files.authority)

    async def both() -> None:
        bystander, _ = await connect(quiet, files)
        peer = Peer(quiet, socket.create_connection(quiet.address, timeout=DEADLINE_SECONDS))
        peer.expect(StartTls)
        with peer.socket, context.wrap_socket(peer.socket, server_hostname=HOST) as wrapped:
            try:
                assert wrapped.recv(1) == b""  # or it learns why from an alert
            except OSError:
                pass
        await hear(bystander, NoticeUpdate, "the peer has no certificate: give it one with --tls-cert and --tls-key")
        bystander.abort()

    asyncio.run(both())


def test_a_plain_peer(controller: ControllerProcess, files: TlsFiles) -> None:
    assert "pass --tls-ca, --tls-cert and --tls-key here too" in told(controller, None)


def test_a_plain_controller(start: Start, files: TlsFiles) -> None:
    assert "it does not use TLS, and this side does" in told(start(world_size=2), files)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", marks=pytest.mark.all),  # these two wait for the deadline
        pytest.param(b"\x16\x03", marks=pytest.mark.all),
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(3000),
    ],
)
def test_a_stranger_that_does_not_go_on_in_tls_is_cut_off(
    quiet: ControllerProcess, files: TlsFiles, data: bytes
) -> None:
    async def both() -> None:
        bystander, _ = await connect(quiet, files)
        with socket.create_connection(quiet.address, timeout=DEADLINE_SECONDS) as stranger:
            stranger.sendall(data)
            await hear(bystander, NoticeUpdate, "refused a connection")
        await hear(bystander, StatusUpdate)
        bystander.abort()

    asyncio.run(both())


def test_what_was_said_before_tls_is_not_heard_in_it(controller: ControllerProcess, files: TlsFiles) -> None:
    """An attacker on the way could put it there: the handshake that follows must not make it trusted."""
    tls = Tls(files)
    with socket.create_connection(controller.address, timeout=DEADLINE_SECONDS) as connection:
        connection.sendall(b"\x00\x00\x00\x01\xc1")
        connection.settimeout(DEADLINE_SECONDS)
        with pytest.raises(OSError), tls.client().wrap_socket(connection, server_hostname=HOST) as wrapped:  # noqa: PT012
            while wrapped.recv(4096):
                pass
            raise ConnectionResetError("it ended")
    assert controller.process.poll() is None
    asyncio.run(connect(controller, files))
