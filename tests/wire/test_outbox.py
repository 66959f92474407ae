"""Messages that must arrive exactly once, whatever becomes of connections and of either side."""

import random

import msgspec

from relight.core.protocol.commands import Kill
from relight.wire.connection.framing import decode, make_decoder
from relight.wire.connection.outbox import Outbox

_decoder = make_decoder(Kill)


def order(number: int) -> Kill:
    return Kill(process=f"w{number}", why="")


def numbers(frames: tuple[bytes, ...]) -> list[int]:
    return [int(decode(_decoder, frame[4:]).process[1:]) for frame in frames]


def test_what_is_not_confirmed_is_sent_again() -> None:
    outbox = Outbox()
    for number in range(5):
        outbox.put(order(number))
    outbox.confirm(3)
    assert numbers(outbox.frames()) == [3, 4]
    assert list(outbox) == [order(3), order(4)]
    outbox.confirm(3)  # again
    outbox.confirm(1)  # late
    assert numbers(outbox.frames()) == [3, 4]


def test_a_new_life_counts_from_nought() -> None:
    outbox = Outbox()
    for number in range(5):
        outbox.put(order(number))
    outbox.confirm(2)
    outbox.begin_anew()
    outbox.confirm(1)
    assert numbers(outbox.frames()) == [3, 4]


def test_what_cannot_be_kept_is_told() -> None:
    outbox = Outbox(max_bytes=100)
    while not outbox.overflowed:
        outbox.put(order(1))
    assert len(outbox.frames()) > 0


class Receiver:
    """Counts, as both sides do."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @property
    def count(self) -> int:
        return len(self.seen)


def test_connections_that_break_anywhere_lose_and_double_nothing() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        outbox, receiver = Outbox(), Receiver()
        flying: list[int] = []
        said = 0
        for _ in range(60):
            match draw.randrange(4):
                case 0:
                    outbox.put(order(said))
                    flying.append(said)
                    said += 1
                case 1 if flying:
                    receiver.seen.append(flying.pop(0))
                case 2:
                    outbox.confirm(draw.randint(0, receiver.count))  # some confirmation, perhaps an old one
                case 3:  # the connection breaks, and with it all that is on its way
                    outbox.confirm(receiver.count)  # said in the handshake
                    flying = numbers(outbox.frames())
        outbox.confirm(receiver.count)
        assert [*receiver.seen, *numbers(outbox.frames())] == list(range(said)), f"seed {seed}"


def test_frames_are_whole_messages() -> None:
    frame = Outbox().put(order(7))
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert msgspec.msgpack.decode(frame[4:])["process"] == "w7"
