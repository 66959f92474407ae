"""Names that `import relight` offers to people who type a dot after it."""

import ast
from pathlib import Path

import relight


def test_an_editor_and_dir_know_every_name() -> None:
    names = dir(relight)
    stub = Path(relight.__file__).with_suffix(".pyi")  # editors and type checkers read it in place of the module
    parsed = ast.parse(stub.read_text())
    imported = {name.asname for node in parsed.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert {*imported, "__version__"} == set(names)
    assert all(callable(getattr(relight, str(name))) for name in imported)
