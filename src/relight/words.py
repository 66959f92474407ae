"""Words that several parts print alike."""

from collections.abc import Sequence


def count(number: int, noun: str, plural: str = "") -> str:
    """ "1 bucket", "2,000 buckets"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """ "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its class: some of a user's cannot even be turned into text."""
    try:
        lines = str(error).splitlines()
    except Exception:
        lines = []
    return (lines or [""])[0] or type(error).__name__


def described(error: BaseException) -> str:
    """ "ValueError: no data", or "ValueError" if it says nothing."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"
