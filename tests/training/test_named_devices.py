"""Each tensor that relight makes is on a device that it names: a script may have set another default."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "relight"

FACTORIES = frozenset(
    "arange as_tensor asarray empty empty_permuted empty_strided eye full linspace normal ones rand randint randn "
    "randperm scalar_tensor tensor zeros".split()
)
LIKE_THE_LIBRARY = frozenset({"integrations/lightning/data.py"})  # draws as torch's DataLoader does


def unnamed(source: str) -> list[int]:
    """Return the lines of calls that leave the device to the default."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_tensors_name_their_device() -> None:
    found = {path.relative_to(SOURCE).as_posix(): unnamed(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    assert {name: lines for name, lines in found.items() if lines and name not in LIKE_THE_LIBRARY} == {}


def test_a_default_is_found() -> None:
    assert unnamed("import torch\na = torch.empty(3)\nb = torch.zeros(3, device='cpu')\nc = torch.tensor([1])") == [
        2,
        4,
    ]
