"""Check that folders, files, classes and functions of `src/` stay small enough to be read at once.

    python -m checks.sizes

Limits are lines: 400 for a file, 250 for a class, 60 for a function; and 12 files for a folder, which should have
about ten, `__init__.py` and `__main__.py` not counted. Each folder says in its `__init__.py` what it is for.
`TOO_LARGE` names the exceptions that are still to be cut; one that has become small enough must leave the list.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "relight"
FOLDER_FILES = 12
FILE_LINES = 400
CLASS_LINES = 250
FUNCTION_LINES = 60
TOO_LARGE: frozenset[str] = frozenset()


def main() -> int:
    """Print each violation; return 1 if there is one."""
    paths = sorted(SOURCE.rglob("*.py"))
    found = dict(entry for path in paths for entry in too_large(path))
    found |= dict(entry for folder in sorted({path.parent for path in paths}) for entry in not_a_room(folder))
    new = sorted(found.keys() - TOO_LARGE)
    for name in new:
        print(f"{name} has {found[name]}")
    mended = sorted(TOO_LARGE - found.keys())
    for name in mended:
        print(f"{name} is small enough now: take it off checks/sizes.py")
    return int(bool(new or mended))


def not_a_room(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a folder: more files than are read at once, or no sentence that says what it is for."""
    name = folder.relative_to(SOURCE).as_posix()
    files = [path for path in folder.glob("*.py") if path.stem not in ("__init__", "__main__")]
    if len(files) > FOLDER_FILES:
        yield name, f"{len(files)} files (limit {FOLDER_FILES})"
    first = folder / "__init__.py"
    if not first.exists() or not ast.get_docstring(ast.parse(first.read_text())):
        yield f"{name}/__init__.py", "no docstring that says what the folder is for"


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
