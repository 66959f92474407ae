"""Scripts that train without relight, told by their text and that of files beside them that they import. No torch."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_RELIGHT = re.compile(r"\brelight\b")
_TRAINS = re.compile(r"\.backward\(|\binit_process_group\(")
_MOST_FILES = 500


def trains_without_relight(script: Path) -> bool:
    """False also if that is not sure: a loop that is in an installed package may use relight."""
    trains, seen, left = False, set[Path](), [script]
    while left and len(seen) < _MOST_FILES:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_text()
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError):
            return False
        if _RELIGHT.search(text):
            return False
        trains |= bool(_TRAINS.search(text))
        left += _imported(tree, path.parent, script.parent)
    return trains and not left


def _imported(tree: ast.Module, here: Path, home: Path) -> Iterator[Path]:
    """Files of the script's directory that a file of the directory `here` imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [(home, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = home if not node.level else here.joinpath(*[".."] * (node.level - 1))
            modules = [(base, f"{node.module or ''}.{alias.name}".strip(".")) for alias in node.names]
        else:
            continue
        for base, name in modules:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                path = base.joinpath(*parts[:length])
                yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file())
