"""The size of the source, room by room, at one commit or several: python -m benchmarks.source [COMMIT ...]

Lines that are not empty, in the Python files below src/relight. *Code* leaves out docstrings and lines that hold a
comment alone. The default is the commit that is checked out; of several, the last is compared with the first.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import subprocess
from collections import Counter
from pathlib import Path

from benchmarks.figures import markdown_table

SOURCE = "src/relight/"
RESULT = Path(__file__).parent / "results" / "source.md"
Sizes = dict[str, tuple[int, int]]  # by room: lines, and lines of code


def git(*arguments: str) -> str:
    """The output of git in this repository."""
    return subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True
    ).stdout


def sizes_at(commit: str) -> Sizes:
    """The lines of each room at a commit, and of all together."""
    lines, code = Counter[str](), Counter[str]()
    for path in git("ls-tree", "-r", "--name-only", commit, SOURCE).splitlines():
        if path.endswith(".py"):
            text = git("show", f"{commit}:{path}")
            parts = path.removeprefix(SOURCE).split("/")
            room = f"{parts[0]}/" if len(parts) > 1 else "cli, flags, config, ..."
            of_file = count(text)
            for name in (room, "all"):
                lines[name] += of_file[0]
                code[name] += of_file[1]
    return {room: (lines[room], code[room]) for room in lines}


def count(text: str) -> tuple[int, int]:
    """The lines of one file that are not empty, and those of them that are code."""
    filled = {number: line.strip() for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    words = {number for number, line in filled.items() if line.startswith("#")}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                words.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(filled), len(filled.keys() - words)


def render(commits: list[str]) -> str:
    """The table, with a column for each commit and one for the change."""
    found = [sizes_at(commit) for commit in commits]
    rooms = sorted({room for sizes in found for room in sizes}, key=lambda room: -found[-1].get(room, (0, 0))[0])
    rows = []
    for room in rooms:
        each = [sizes.get(room, (0, 0)) for sizes in found]
        change = [f"{each[-1][0] - each[0][0]:+,}"] if len(each) > 1 else []
        rows.append([room, *(f"{lines:,} ({code:,})" for lines, code in each), *change])
    header = ["room", *(git("log", "-1", "--format=%h of %cs", commit).strip() for commit in commits)]
    return markdown_table([*header, *(["change"] if len(commits) > 1 else [])], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="The size of the source, room by room")
    parser.add_argument("commits", nargs="*", default=["HEAD"], metavar="COMMIT")
    parser.add_argument("--write", action="store_true", help="also write benchmarks/results/source.md")
    options = parser.parse_args()
    table = render(options.commits)
    print(table)
    if options.write:
        today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        command = f"python -m benchmarks.source {' '.join(options.commits)}"
        RESULT.write_text(
            f"# source\n\nCounted {today} by `{command}`: lines that are not empty, and lines of code in "
            f"parentheses.\n\n{table}\n"
        )


if __name__ == "__main__":
    main()
