"""Slurm's short form of a list of hosts, such as `n[1-3,07],login,gpu[1-2]-ib`. Pure."""

import itertools
import re
from collections.abc import Iterator

MAX_HOSTS = 65536
# A name, or a part of one, and then perhaps numbers in brackets; again and again up to a comma or to the end.
_PIECE = re.compile(r"(?P<text>[A-Za-z0-9_.:-]+)|\[(?P<numbers>[0-9,-]+)\]")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?")


def expand(text: str) -> tuple[str, ...]:
    """Return the names of the hosts, in order. Raises ValueError if `text` is no such list."""
    names: list[str] = []
    for choices in _hosts(text):
        count = 1
        for choice in choices:
            count *= len(choice)
        if len(names) + count > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} hosts")
        names += ["".join(parts) for parts in itertools.product(*choices)]
    return tuple(names)


def _hosts(text: str) -> Iterator[list[tuple[str, ...]]]:
    """Yield each element between outer commas, as the choices for each part of its names."""
    position, choices = 0, list[tuple[str, ...]]()
    while position < len(text):
        if text[position] == "," and choices:
            yield choices
            choices = []
            position += 1
            continue
        piece = _PIECE.match(text, position)
        if piece is None:
            raise ValueError(f"{text[position:][:20]!r} at character {position + 1}")
        numbers = piece["numbers"]
        choices.append((piece["text"],) if numbers is None else tuple(_numbers(numbers)))
        position = piece.end()
    if not choices:
        raise ValueError("a name is missing at the end")
    yield choices


def _numbers(text: str) -> Iterator[str]:
    """Yield the numbers of `1-3,07`: as wide as the first of each range is written."""
    total = 0
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"{part!r} is neither a number nor a range")
        first, last = found["first"], found["last"] or found["first"]
        if int(last) < int(first):
            raise ValueError(f"the range {part} goes down")
        total += int(last) - int(first) + 1
        if total > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} hosts")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
