"""Words that several commands print alike."""


def count(number: int, noun: str, plural: str = "") -> str:
    """ "1 bucket", "2,000 buckets"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
