"""A flood of nonsense against a live controller: strangers who talk, strangers who hold connections, and insiders.

Run by ``python -m benchmarks.flood HOST PORT SEED PRIVATE_DIR``; ends with its standard input, and prints how many
frames of each kind the controller has taken. Strangers know no token: their first frame is their last. Insiders prove
that they know it (it lies in PRIVATE_DIR), say again and again what was said before, and end with nonsense.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from relight.errors import ProtocolError
from relight.wire.connection.framing import decode, encode_frame, make_decoder
from relight.wire.connection.handshake import ConnectingSide, read_token
from relight.wire.connection.streams import receive_payload
from relight.wire.messages import PROTOCOL_VERSION, Challenge, Hello, Samples, WorkerHello

TALKERS = 6
HOLDERS = 80  # more than the controller lets wait: the holder of a place loses it to the next, and comes again
INSIDERS = 2
REPLAYED = 2000  # frames on one connection of an insider, before the one that ends it
ANSWER_S = 15.0
_PICKLE = b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
_challenge = make_decoder(Challenge)
_MESSAGES: tuple[msgspec.Struct, ...] = (
    Samples(samples=()),
    WorkerHello(process="w0", pid=1),
)


def nonsense(chance: random.Random) -> tuple[str, bytes]:
    """The words of one stranger, and which kind it is."""
    kind = chance.choice(list(_KINDS))
    return kind, _KINDS[kind](chance)


def _random(chance: random.Random) -> bytes:
    return chance.randbytes(chance.randint(1, 300))


def _framed(chance: random.Random) -> bytes:
    payload = _random(chance)
    return struct.pack(">I", len(payload)) + payload


def _oversized(chance: random.Random) -> bytes:
    return struct.pack(">I", chance.randint(2**17, 2**32 - 1)) + _random(chance)


def _hello(chance: random.Random) -> Hello:
    name = chance.choice(("node-0", "someone", "../../etc", "", "x" * 70))
    role = chance.choice(("agent", "observer", "master"))
    version = chance.choice((PROTOCOL_VERSION, PROTOCOL_VERSION, 0, 2**40))
    return Hello(protocol_version=version, role=role, name=name, mac=chance.randbytes(32), nonce=chance.randbytes(32))


def _forged(chance: random.Random) -> bytes:
    return encode_frame(_hello(chance))


def _flipped(chance: random.Random) -> bytes:
    frame = bytearray(encode_frame(_hello(chance)))
    for _ in range(chance.randint(1, 4)):
        frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
    return bytes(frame)


def _truncated(chance: random.Random) -> bytes:
    frame = encode_frame(_hello(chance))
    return frame[: chance.randrange(len(frame))]


def _too_early(chance: random.Random) -> bytes:
    """Messages that only a peer that has proved itself may send; several, in any order."""
    return b"".join(encode_frame(chance.choice(_MESSAGES)) for _ in range(chance.randint(1, 5)))


_KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "random bytes": _random,
    "framed random bytes": _framed,
    "oversized": _oversized,
    "forged hello": _forged,
    "flipped bits": _flipped,
    "truncated": _truncated,
    "out of order": _too_early,
    "pickle": lambda _: struct.pack(">I", len(_PICKLE)) + _PICKLE,
    "http": lambda _: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def _end_of_insider(chance: random.Random, hello: bytes) -> tuple[str, bytes]:
    """The last frame of one who knows the token: well-formed up to then, and now this."""
    match chance.randrange(4):
        case 0:
            return "malformed, from one who knows the token", _framed(chance)
        case 1:
            return "oversized, from one who knows the token", _oversized(chance)
        case 2:
            return "truncated, from one who knows the token", hello[: chance.randrange(1, len(hello))]
        case _:
            return "out of order, from one who knows the token", encode_frame(chance.choice(_MESSAGES))


class Flood:
    """Some threads that talk, some that hold connections open, some that know the token."""

    def __init__(self, address: tuple[str, int], seed: int, token: bytes) -> None:
        self._token = token
        self._address = address
        self._seed = seed
        self.over = threading.Event()
        self.answered: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._talk, args=(number,), daemon=True) for number in range(TALKERS)]
        threads += [threading.Thread(target=self._hold, daemon=True) for _ in range(HOLDERS)]
        threads += [threading.Thread(target=self._intrude, args=(number,), daemon=True) for number in range(INSIDERS)]
        for thread in threads:
            thread.start()
        return threads

    def _talk(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        while not self.over.is_set():
            kind, data = nonsense(chance)
            if self._say(data):
                with self._lock:
                    self.answered[kind] += 1

    def _say(self, data: bytes) -> bool:
        """Return whether the controller has taken it and cut us off."""
        try:
            with socket.create_connection(self._address, timeout=ANSWER_S) as connection:
                connection.settimeout(ANSWER_S)
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
        except ConnectionResetError:  # it closed with our nonsense unread
            return True
        except OSError:
            return False
        return True

    def _hold(self) -> None:
        while not self.over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=ANSWER_S) as connection:
                connection.settimeout(ANSWER_S)
                while connection.recv(65536):
                    pass

    def _intrude(self, number: int) -> None:
        chance = random.Random(f"{self._seed} insider {number}")
        while not self.over.is_set():
            with contextlib.suppress(OSError, ProtocolError):
                role, name = chance.choice((("observer", f"insider-{number}"), ("agent", "node-0")))
                self._say_again(chance, role, name)

    def _say_again(self, chance: random.Random, role: str, name: str) -> None:
        """As an observer; or as the agent's double, who is refused though he knows the token."""
        with socket.create_connection(self._address, timeout=ANSWER_S) as connection:
            payload = receive_payload(connection)
            if payload is None:
                return
            challenge: Challenge = decode(_challenge, payload)
            mine = Hello(protocol_version=PROTOCOL_VERSION, role=role, name=name)
            hello = encode_frame(ConnectingSide(self._token).answer(challenge, mine))
            kind, last = _end_of_insider(chance, hello)
            connection.sendall(hello)
            if role == "observer":
                connection.sendall(hello * REPLAYED + last)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(65536):  # once it has ended, all before has been read
                    pass
            with self._lock:
                if role == "observer":
                    self.answered["replayed, from one who knows the token"] += REPLAYED
                    self.answered[kind] += 1
                else:
                    self.answered["the agent's double, who knows the token"] += 1


def main() -> None:
    host, port, seed, private_dir = sys.argv[1:]
    flood = Flood((host, int(port)), int(seed), read_token(private_dir))
    started = time.monotonic()
    flood.start()
    sys.stdin.read()
    flood.over.set()
    print(json.dumps({"answered": flood.answered, "seconds": time.monotonic() - started}))


if __name__ == "__main__":
    main()
