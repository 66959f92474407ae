"""Coverage-guided nonsense: `make fuzz`, or `python -m tests.wire.fuzz SECONDS [DIRECTORY]`. Needs atheris.

What finds new ways through the controller is kept in DIRECTORY (`fuzz-found`), and begun with the next time. What
breaks it is written to `crash-...` in the current directory: move it to `tests/wire/corpus`, which `test_corpus.py`
replays, under a name that tells what it broke.
"""

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["relight"]):
    from tests.wire.session import MESSAGES, Judge, frames, seeds

from relight.errors import ProtocolError
from relight.wire.connection.framing import split_payloads
from tests.wire.bending import bend

CORPUS = Path(__file__).parent / "corpus"
_LONGEST = 4096


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Most often frame by frame, so that what follows a changed frame is still heard."""
    chance = random.Random(seed)
    if chance.random() < 0.2:
        return bytes(atheris.Mutate(data, max_size))
    who, rest = data[:1] or b"\3", bytearray(data[1:])
    try:
        payloads = list(split_payloads(rest))
    except ProtocolError:
        payloads = []
    match chance.randrange(8):
        case 0 if payloads:  # drop
            del payloads[chance.randrange(len(payloads))]
        case 1 if payloads:  # say again
            payloads.insert(chance.randrange(len(payloads) + 1), chance.choice(payloads))
        case 2 if len(payloads) > 1:  # reorder
            chance.shuffle(payloads)
        case 3:  # something that makes sense, somewhere
            payloads.insert(chance.randrange(len(payloads) + 1), frames(chance.choice(MESSAGES))[4:])
        case 4:
            who = bytes([chance.randrange(4)])
        case _ if payloads:
            place = chance.randrange(len(payloads))
            bent = bend(payloads[place], chance) if chance.random() < 0.7 else None
            payloads[place] = bent or bytes(atheris.Mutate(payloads[place], len(payloads[place]) + 16))
    stream = b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads)
    return (who + stream + bytes(rest))[:max_size]


def main() -> None:
    """Run for some seconds."""
    seconds = sys.argv[1] if len(sys.argv) > 1 else "600"
    found = Path(sys.argv[2] if len(sys.argv) > 2 else "fuzz-found")
    found.mkdir(parents=True, exist_ok=True)
    judge = Judge()

    def one_input(data: bytes) -> None:
        wrong = judge.judge(data)
        if wrong:
            raise AssertionError(wrong)

    with tempfile.TemporaryDirectory() as first:
        for name, data in seeds().items():
            (Path(first) / name).write_bytes(data)
        flags = [f"-max_total_time={seconds}", f"-max_len={_LONGEST}", "-timeout=30", str(found), str(CORPUS), first]
        atheris.Setup([sys.argv[0], *flags], one_input, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
