"""The quick starts of docs/CLUSTERS.md, as they stand there, with what differs here put in their place."""

from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "CLUSTERS.md"
MAX_LINES = 24  # of a block: it fits on a screen


def quick_start(heading: str, language: str, replaced: dict[str, str]) -> str:
    """Return the first block of code below a heading. `replaced`: each of these must be in it."""
    section = _PAGE.read_text().partition(f"\n## {heading}\n")[2]
    block = section.partition(f"```{language}\n")[2].partition("\n```")[0]
    assert block, f"no quick start below {heading!r}"
    assert len(block.splitlines()) <= MAX_LINES
    for old, new in replaced.items():
        assert old in block, f"{old!r} is not in the quick start of {heading}:\n{block}"
        block = block.replace(old, new)
    return block
