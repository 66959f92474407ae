"""`relight weights gate` and `relight weights relay`: what is published on one host, in the engines of another.

No torch.
"""

import argparse
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relight.errors import TransferError, UsageError
from relight.flags import add_options, read_options
from relight.weights.options import BridgeOptions, RelayOptions
from relight.wire.connection.address import bracketed
from relight.wire.connection.tls import Tls, TlsFiles, prove_certificate

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MIN_TOKEN_BYTES = 16
_MAX_TOKEN_BYTES = 4096
_EXAMPLES = """\
example: a trainer on host 10.0.0.1 that publishes to runs/mine, engines on two other hosts

  10.0.0.1:   relight weights gate runs/mine 10.0.0.1:7100 --token-file ~/relight.token
  elsewhere:  relight weights relay 10.0.0.1:7100 runs/serving --token-file ~/relight.token
              and in each engine there: relight.Receiver("runs/serving", model=model)

The gate makes the token file if there is none; copy it to the other hosts. The weights are encrypted on the network
only with --tls-ca, --tls-cert and --tls-key, on both sides.
Gate and relay run until Ctrl-C, and may be started in any order, before or after publisher and engines.
"""


def add_commands(subcommands: "argparse._SubParsersAction[Any]") -> None:
    """Add `weights gate` and `weights relay`."""
    gate = _add(
        subcommands,
        "gate",
        help="offer the weights published here to relays on other hosts",
        description="Pass on the weights published at PLACE to relays on other hosts, each bucket straight from the "
        "publisher's buffers.",
    )
    gate.add_argument("place", metavar="PLACE", type=Path, help="the publisher's directory, as a job's run directory")
    gate.add_argument("endpoint", metavar="ADDRESS:PORT", help="an address of this host, and the port to listen at")
    gate.set_defaults(call=_gate)
    relay = _add(
        subcommands,
        "relay",
        help="bring weights published on another host to the engines here",
        description="Receive the weights that are published on the gate's host, and publish them to the engines at "
        "PLACE: over the network once, however many they are, through two buffers, without a copy of the weights.",
    )
    relay.add_argument("endpoint", metavar="HOST:PORT", help="where the gate on the publisher's host listens")
    relay.add_argument("place", metavar="PLACE", type=Path, help="a directory shared with the engines; made if missing")
    relay.set_defaults(call=_relay)


def _add(
    subcommands: "argparse._SubParsersAction[Any]", name: str, *, help: str, description: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subcommands.add_parser(
        name,
        help=help,
        description=description,
        epilog=_EXAMPLES,
    )
    add_options(parser, RelayOptions if name == "relay" else BridgeOptions)
    return parser


def _gate(arguments: argparse.Namespace) -> int:
    from relight.transfer.relay.publish_bridge import PublishBridge

    asked = read_options(arguments, BridgeOptions)
    host, port = _resolve(arguments.endpoint)
    if not asked.token_file.exists():
        _make_token(asked.token_file)
    token = _read_token(asked.token_file)
    tls = _find_tls(asked, _typed_host(arguments.endpoint))
    try:
        with PublishBridge(arguments.place, host, port, token=token, tls=tls, on_notice=_say) as gate:
            _say(f"relays reach {arguments.place} at {gate.endpoint}; Ctrl-C ends it")
            return _until_interrupted(threading.Event().wait)
    except TransferError as error:
        _say(str(error))
        return 1


def _relay(arguments: argparse.Namespace) -> int:
    from relight.transfer.relay.relay import Relay

    asked = read_options(arguments, RelayOptions)
    host, port = _resolve(arguments.endpoint)
    token = _read_token(asked.token_file)
    try:
        arguments.place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{arguments.place} cannot be made: {error.strerror}") from error
    endpoint = f"{bracketed(host)}:{port}"
    relay = Relay(
        endpoint,
        arguments.place,
        token=token,
        tls=_find_tls(asked),
        server_name=_typed_host(arguments.endpoint),
        name=asked.name,
        on_notice=_say,
    )
    _say(f"bringing the weights published at {endpoint} to the engines at {arguments.place}; Ctrl-C ends it")
    try:
        return _until_interrupted(relay.run)
    except TransferError as error:
        _say(str(error))
        return 1


def _find_tls(asked: BridgeOptions, *names: str) -> Tls | None:
    files = TlsFiles(authority=asked.tls_ca, certificate=asked.tls_cert, key=asked.tls_key)
    given = (files.authority, files.certificate, files.key)
    if not any(given):
        return None
    if not all(given):
        raise UsageError("TLS needs --tls-ca, --tls-cert and --tls-key together")
    return prove_certificate(files, *names)


def _until_interrupted(work: Callable[[], object]) -> int:
    def interrupt(_: int, __: object) -> None:
        for number in _ENDING:  # once is enough: a second one must not break off the cleaning up
            signal.signal(number, lambda *_: None)
        raise KeyboardInterrupt

    for number in _ENDING:  # also where a shell has them ignored
        signal.signal(number, interrupt)
    try:
        work()
    except KeyboardInterrupt:
        return 130
    return 0


def _typed_host(endpoint: str) -> str:
    """Return the name that the certificate must have: the host as written, before it is looked up."""
    return endpoint.rpartition(":")[0].removeprefix("[").removesuffix("]")


def _resolve(endpoint: str) -> tuple[str, int]:
    """HOST:PORT to an IP address and a port."""
    host, _, port = endpoint.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise UsageError(f"{endpoint!r}: write a host and a port, such as 10.0.0.1:7100")
    try:
        found = socket.getaddrinfo(host.removeprefix("[").removesuffix("]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{endpoint!r}: there is no host of this name: {error}") from error
    return str(found[0][4][0]), int(port)


def _make_token(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be made: {error.strerror}") from error
    _say(f"made {path}: copy it to the hosts of the relays")


def _read_token(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            token = file.read(_MAX_TOKEN_BYTES).strip()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; copy it from the gate's host") from error
    if len(token) < _MIN_TOKEN_BYTES:
        raise UsageError(f"{path} holds {len(token)} bytes: a secret of at least {_MIN_TOKEN_BYTES} is needed")
    return token


def _say(what: str) -> None:
    print(f"relight: {what}", file=sys.stderr, flush=True)
