"""Writes a page that is made from code, or compares it with the code."""

from collections.abc import Sequence
from pathlib import Path


def write_or_check(arguments: Sequence[str], page: Path, text: str) -> int:
    """Write `text` to `page`; with --check, only compare. Returns the exit status: 1 if they differ."""
    if "--check" not in arguments:
        page.write_text(text)
        return 0
    if page.is_file() and page.read_text() == text:
        return 0
    script = f"docs/{page.stem.lower()}_page.py"
    print(f"{page} is not what the code says: run `python {script}`, and read the difference")
    return 1
