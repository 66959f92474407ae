"""Check that files, classes and functions of `src/` stay small enough to be read at once.

    python -m checks.sizes

Limits are lines: 400 for a file, 250 for a class, 60 for a function. `TOO_LARGE` names the exceptions that are still
to be cut; one that has become small enough must leave the list.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "relight"
FILE_LINES = 400
CLASS_LINES = 250
FUNCTION_LINES = 60
TOO_LARGE: frozenset[str] = frozenset()


def main() -> int:
    """Print each violation; return 1 if there is one."""
    found = dict(entry for path in sorted(SOURCE.rglob("*.py")) for entry in too_large(path))
    new = sorted(found.keys() - TOO_LARGE)
    for name in new:
        print(f"{name} has {found[name]}")
    mended = sorted(TOO_LARGE - found.keys())
    for name in mended:
        print(f"{name} is small enough now: take it off checks/sizes.py")
    return int(bool(new or mended))


def too_large(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what is too large in one file, as (name, lines and limit)."""
    text, name = path.read_text(), path.relative_to(SOURCE).as_posix()
    if (lines := text.count("\n")) > FILE_LINES:
        yield name, f"{lines} lines (limit {FILE_LINES})"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            limit = CLASS_LINES
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = FUNCTION_LINES
        else:
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > limit:
            yield f"{name}:{node.name}", f"{lines} lines (limit {limit})"


if __name__ == "__main__":
    sys.exit(main())
