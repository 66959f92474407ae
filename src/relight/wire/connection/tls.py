"""TLS between hosts, if the job has it: which files, whom they prove, and what to say when they do not.

Both sides have a certificate of the job's authority, and accept no other. The proof of the token follows all the same.
A connection begins with a frame of the listening side, so that two sides of which only one wants TLS can say so:

    listening side  -> connecting side   StartTls(protocol_version), in the clear
    both                                 the handshake of TLS 1.3; nothing that came before it is read after it
    listening side  -> connecting side   Challenge, and all the rest, encrypted
"""

import asyncio
import os
import ssl
from pathlib import Path

import msgspec

from relight.errors import ProtocolError, UsageError

FLAGS = ("--tls-ca", "--tls-cert", "--tls-key")
VARIABLES = ("RELIGHT_TLS_CA", "RELIGHT_TLS_CERT", "RELIGHT_TLS_KEY")
NO_TLS_HERE = "it uses TLS, and this side has no certificates: pass --tls-ca, --tls-cert and --tls-key here too"
NO_TLS_THERE = (
    "it does not use TLS, and this side does: pass --tls-ca, --tls-cert and --tls-key on all hosts, or on none"
)
BROKEN_OFF = (
    "the other side broke off the TLS handshake: it does not accept the certificate of this one, and says over there "
    "why; are --tls-ca and --tls-cert of the same authority on all hosts?"
)
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "PACKET_LENGTH_TOO_LONG")
_HUNG_UP = ("UNEXPECTED_EOF_WHILE_READING",)
_ROUNDS = 8  # a handshake takes three


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of PEM files: the job's authority, this host's certificate, and its key."""

    authority: str
    certificate: str
    key: str


def files_from_environment() -> TlsFiles | None:
    """Return the files that `relight run` left to its children (`leave_to_children`). None: this job has no TLS."""
    authority, certificate, key = (os.environ.get(variable, "") for variable in VARIABLES)
    return TlsFiles(authority=authority, certificate=certificate, key=key) if authority else None


def leave_to_children(files: TlsFiles) -> None:
    """Say in the environment of this process, which its children inherit, where the files are."""
    for variable, path in zip(VARIABLES, (files.authority, files.certificate, files.key), strict=True):
        os.environ[variable] = str(Path(path).absolute())


class Tls:
    """This process's part in TLS. Files that are renewed while it runs count from the next connection on."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises OSError (ssl.SSLError is one) if the files cannot be read or do not belong together."""
        self.files = files
        self._stamp = self._look()
        self._contexts = _load(files)

    @classmethod
    def from_environment(cls) -> "Tls | None":
        """Raises ProtocolError if there are files and they cannot be used."""
        files = files_from_environment()
        if files is None:
            return None
        try:
            return cls(files)
        except OSError as error:
            raise ProtocolError(f"the certificate {files.certificate} cannot be used: {error}") from error

    def server(self) -> ssl.SSLContext:
        """Return the context for an accepted connection: TLS 1.3, and a peer with a certificate of the authority."""
        self._renew()
        return self._contexts[0]

    def client(self) -> ssl.SSLContext:
        """Return the context for a connection to a host that has to prove its name."""
        self._renew()
        return self._contexts[1]

    def _look(self) -> tuple[int, ...]:
        found = [os.stat(path) for path in msgspec.structs.astuple(self.files)]
        return tuple(number for one in found for number in (one.st_mtime_ns, one.st_ino, one.st_size))

    def _renew(self) -> None:
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._contexts = _load(self.files)
                self._stamp = stamp
        except OSError:  # half of them are written: the old ones do until the next connection
            pass


def _load(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in contexts:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(files.authority)
        # An empty password rather than a question on the terminal, for a key that is encrypted.
        context.load_cert_chain(files.certificate, files.key, password="")
    contexts[0].num_tickets = 0  # sessions are not resumed; a ticket would look like a message (`is_readable`)
    return contexts


def rehearse(tls: Tls, name: str) -> None:
    """Shake hands with oneself as `name`: what would be refused elsewhere is found here, and said exactly.

    Raises ssl.SSLError.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = tls.client().wrap_bio(to_client, to_server, server_hostname=name)
    server = tls.server().wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_ROUNDS):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue


def prove_certificate(files: TlsFiles, *names: str) -> Tls:
    """This host's part in TLS, if its certificate would be accepted as that of each of `names`. Raises UsageError."""
    for flag, path in zip(FLAGS, (files.authority, files.certificate, files.key), strict=True):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"{flag} {path}: {error.strerror or error}") from error
    if os.stat(files.key).st_mode & 0o077:
        raise UsageError(f"--tls-key {files.key} can be read by others; chmod 600 it")
    try:
        tls = Tls(files)
    except OSError as error:
        what = getattr(error, "reason", None) or "no PEM file of this kind"
        raise UsageError(
            f"--tls-cert {files.certificate} with --tls-key {files.key} and --tls-ca {files.authority} cannot be used: "
            f"{what.lower().replace('_', ' ')}"
        ) from error
    for name in names:
        try:
            rehearse(tls, name)
        except ssl.SSLError as error:
            raise UsageError(f"--tls-cert {files.certificate}: {explain(error, 'this')}") from error
    return tls


def explain(error: BaseException, whose: str) -> str:
    """Return what to do about a failed handshake. `whose` certificate was checked, such as "the controller's"."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{whose} certificate {_explain_certificate(error)}"
    if isinstance(error, TimeoutError) or "taking longer" in str(error):
        return "the TLS handshake was not done in time; does the other side speak TLS?"
    reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else ""
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the peer has no certificate: give it one with --tls-cert and --tls-key"
    if reason in _NO_TLS:
        return "the peer does not speak TLS 1.3: give it --tls-ca, --tls-cert and --tls-key"
    if "ALERT" in reason:
        return f"the other side does not accept the certificate of this one ({reason.lower().replace('_', ' ')})"
    if reason and reason not in _HUNG_UP:
        return f"the TLS handshake failed: {reason.lower().replace('_', ' ')}"
    return BROKEN_OFF


def _explain_certificate(error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:
        case 10:
            return "has expired: renew it"
        case 9:
            return "is not valid yet: look at the clocks of both hosts"
        case 18 | 19 | 20 | 21:
            return "is not signed by the authority in --tls-ca: give all hosts the same authority"
        case 62 | 64:
            told = error.verify_message.rstrip(".")
            return f"is for another host ({told}): issue one with this name or address as a subject alternative name"
        case 26:
            return "must be good for clients and for servers (extended key usage): issue another"
        case _:
            return f"is refused: {error.verify_message}"


class _Protocol(asyncio.StreamReaderProtocol):
    def __init__(self, reader: asyncio.StreamReader, before: asyncio.StreamWriter) -> None:
        super().__init__(reader)
        self._before = before  # kept: newer Pythons close the connection with the last reference to it


async def start_tls(
    writer: asyncio.StreamWriter, context: ssl.SSLContext, *, server_name: str | None, timeout_seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Go on in TLS: streams that take the place of those that `writer` belongs to. None as a name: the server's side.

    Begins before it waits for anything, and what the old reader still holds is not read. Raises OSError.
    """
    reader = asyncio.StreamReader()
    protocol = _Protocol(reader, writer)
    loop = asyncio.get_running_loop()
    transport = await loop.start_tls(
        writer.transport,
        protocol,
        context,
        server_side=server_name is None,
        server_hostname=server_name,
        ssl_handshake_timeout=timeout_seconds,
        ssl_shutdown_timeout=timeout_seconds,
    )
    if transport is None:  # it was closed meanwhile
        raise ConnectionResetError("the connection ended in the TLS handshake")
    protocol.connection_made(transport)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
