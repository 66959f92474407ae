"""The handshake of every TCP connection: both sides prove that they know the job's token, and never send it.

    listening side  -> connecting side   Challenge(protocol_version, nonce)
    connecting side -> listening side    Hello(protocol_version, role, name, nonce, mac, ...)
    listening side  -> connecting side   Welcome(mac, ...), or Refused(reason)

In TLS (tls.py) all this comes after StartTls. No input or output here: server/network/admission.py and
agent/connection/controller_connection.py read and write it at the controller's port, transfer/io/tcp.py for state and
weights between workers.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from pathlib import Path

import msgspec

from relight.errors import ProtocolError
from relight.wire.messages import PROTOCOL_VERSION, Challenge, Hello, StartTls

NAME = re.compile(r"[a-z0-9-]{1,64}")
ROLES = ("agent", "observer")  # of those that connect to the controller
CONTROLLER = "controller"
NONCE_BYTES = 32
_CONTEXT = b"relight handshake"


class ListeningSide:
    """The proof of a peer that has connected, and this side's own. For one connection."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def challenge(self) -> Challenge:
        """Return the first message to the peer."""
        return Challenge(protocol_version=PROTOCOL_VERSION, nonce=self._nonce)

    def check(self, hello: Hello, roles: Collection[str], *, named: bool = False) -> None:
        """Raise ProtocolError unless the peer speaks this version, has one of these roles and knows the token.

        `named`: it must have a name too.
        """
        _check_version(hello.protocol_version)
        if hello.role not in roles or ((named or hello.name) and not NAME.fullmatch(hello.name)):
            raise ProtocolError(f"{hello.role[:64]!r} {hello.name[:64]!r} is no valid role and name")
        expected = _proof(self._token, hello.role, hello.name, self._nonce, hello.nonce)
        if len(hello.nonce) != NONCE_BYTES or not hmac.compare_digest(expected, hello.mac):
            raise ProtocolError("the peer does not know this job's token")

    def proof(self, hello: Hello, role: str, name: str = "") -> bytes:
        """Return this side's proof, for Welcome."""
        return _proof(self._token, role, name, self._nonce, hello.nonce)


class ConnectingSide:
    """The proof of this side, and that of the peer it has connected to. For one connection."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""

    def answer(self, challenge: Challenge, hello: Hello) -> Hello:
        """Complete `hello`, which lacks the proof. Raises ProtocolError if the peer speaks another version."""
        check_version(challenge)
        self._peer_nonce = challenge.nonce
        mac = _proof(self._token, hello.role, hello.name, self._peer_nonce, self._nonce)
        return msgspec.structs.replace(hello, nonce=self._nonce, mac=mac)

    def check(self, mac: bytes, role: str, name: str = "") -> None:
        """Raise ProtocolError unless the peer, in this role and under this name, knows the token."""
        if not hmac.compare_digest(mac, _proof(self._token, role, name, self._peer_nonce, self._nonce)):
            raise ProtocolError("it does not know this job's token")


def check_version(first: Challenge | StartTls) -> None:
    """Raise ProtocolError if the peer speaks another version than this side."""
    _check_version(first.protocol_version)


def read_token(private_dir: str | Path) -> bytes:
    """Read the job's token from the private directory, which only its owner can read."""
    return (Path(private_dir) / "token").read_bytes()


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol version {version}, this side version {PROTOCOL_VERSION}: install the same "
            "relight on all hosts"
        )


def _proof(token: bytes, role: str, name: str, nonce: bytes, peer_nonce: bytes) -> bytes:
    """Return the HMAC-SHA256 over role, name and both nonces; `nonce` is the listening side's.

    It is worth nothing on another connection, in another role or under another name: each part is preceded by its
    length, so that no two lists of parts look the same.
    """
    parts = (_CONTEXT, role.encode(), name.encode(), nonce, peer_nonce)
    return hmac.new(token, b"".join(len(part).to_bytes(4, "big") + part for part in parts), hashlib.sha256).digest()
