"""What `import relight` offers, to people who type a dot behind it."""

import ast
from pathlib import Path

import relight


def test_an_editor_and_dir_know_every_name() -> None:
    assert dir(relight) == sorted(relight.__all__)
    stub = Path(relight.__file__).with_suffix(".pyi")  # editors and type checkers read it in place of the module
    parsed = ast.parse(stub.read_text())
    imported = {name.asname for node in parsed.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert imported | {"__version__"} == set(relight.__all__)
    assert all(callable(getattr(relight, name)) for name in imported if name is not None)
