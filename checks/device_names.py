"""Check that only the room `device` names kinds of devices and their collectives.

    python -m checks.device_names

Other rooms ask `relight.device` for abilities, so that a new kind of device is one more file there. The check reads
syntax trees: it reports identifiers that contain such a word, and strings without spaces that do ("cuda:0"). Sentences
for people may name a device.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "relight"
HOME = "device"
WORDS = frozenset(
    {
        "cuda",
        "cudart",
        "cudnn",
        "cublas",
        "hccl",
        "hip",
        "hpu",
        "mps",
        "nccl",
        "npu",
        "nvml",
        "rccl",
        "rocm",
        "xccl",
        "xpu",
    }
)
SETTINGS_OF_OTHERS = frozenset({"disable_cuda_graphs"})  # torchtitan's, which is refused by its name
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_IDENTIFIERS = ("id", "attr", "arg", "name", "asname", "module")  # fields of syntax trees that hold one


def main() -> int:
    """Print each violation; return 1 if there is one."""
    paths = (path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] != HOME)
    found = [
        f"{path.relative_to(SOURCE.parents[1])}:{line}: {name!r} names a kind of device; ask relight.device"
        for path in paths
        for line, name in violations(ast.parse(path.read_text()))
    ]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


def violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each name of a device in a file."""
    line = 1
    for node in ast.walk(tree):
        line = getattr(node, "lineno", line)
        names = [value for field in _IDENTIFIERS if isinstance(value := getattr(node, field, None), str)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            names.append(node.value)
        yield from ((line, name) for name in names if names_device(name))


def names_device(text: str) -> bool:
    """Return whether one of the words in an identifier or a string is the name of a kind of device."""
    return text not in SETTINGS_OF_OTHERS and any(word.lower() in WORDS for word in _WORD.findall(text))


if __name__ == "__main__":
    sys.exit(main())
