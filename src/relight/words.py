"""Words that several parts print alike."""

from collections.abc import Sequence


def count(number: int, noun: str, plural: str = "") -> str:
    """ "1 bucket", "2,000 buckets"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """ "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
