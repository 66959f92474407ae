"""Check the beginnings of docstrings, and words that hide the subject of a sentence.

    python -m checks.sentences

A docstring begins with a verb or a noun, never with a question word ("True if", "Return whether" instead of "Whether");
that of a test may go on with the test's name. A sentence names its subject: "no rank" instead of "nobody", "a process
that" instead of "whoever". The check covers code and pages of every folder and the README, but for scripts written as
other people write, and for recorded results.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "docs", "tests", "benchmarks", "examples")
LEFT_OUT = ("tests/idioms/scripts", "benchmarks/results")  # written as other people write; records
_QUESTION = "How|What|When|Where|Whether|Which|Who|Whom|Whose|Why"
BEGINNING = re.compile(rf"({_QUESTION}|Of|The same)\b")
BEGINNING_IN_SOURCE = re.compile(rf"({_QUESTION}|After|Before|By|If|In|It|Of|On|That|The same)\b")
WORD = re.compile(r"\b(nobody|somebody|whoever)\b", re.IGNORECASE)


def main() -> int:
    """Print each violation; return 1 if there is one."""
    found = [text for folder in FOLDERS for path in files(folder) for text in violations(path)]
    found += violations(ROOT / "README.md")
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


def files(folder: str) -> list[Path]:
    """Return the files of people's words: code and pages."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".svg"))
    return sorted(path for path in paths if not any(path.is_relative_to(ROOT / left_out) for left_out in LEFT_OUT))


def violations(path: Path) -> Iterator[str]:
    """Yield what is wrong in one file, with its line."""
    name, text = path.relative_to(ROOT), path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        for match in WORD.finditer(line):
            yield f"{name}:{number}: name the subject instead of {match.group()!r}"
    if path.suffix != ".py":
        return
    pattern = BEGINNING_IN_SOURCE if path.is_relative_to(ROOT / "src") else BEGINNING
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            beginning = pattern.match(ast.get_docstring(node) or "")
            if beginning is not None:
                line_number = node.body[0].lineno
                yield f"{name}:{line_number}: a docstring begins with {beginning.group()!r}"


if __name__ == "__main__":
    sys.exit(main())
