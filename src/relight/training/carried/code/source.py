"""The source of a running script: files and frames of the user's, and the way to a line in a function.

Everything here reads code and changes nothing. A frame whose source cannot be read (made by `exec`, rewritten by the
compiler) has no answer: None.
"""

import ast
import functools
import itertools
import linecache
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from relight.script_files import is_file_of_relight, is_script_file, is_script_module
from relight.training.carried.code.normal import in_usual_words

LOOPS = (ast.For, ast.While, ast.AsyncFor)
Way = list[tuple[list[ast.stmt], int]]  # to a place, from the outermost statement: its list, its place in that
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_OWN = str(Path(__file__).parents[2]) + "/"


def is_user_frame(frame: FrameType) -> bool:
    """Return whether a frame runs code of the script's, from a file or from a text (`exec`)."""
    file = frame.f_code.co_filename
    if file.startswith("<") and not file.startswith("<frozen "):
        return is_script_module(frame.f_globals.get("__name__", "builtins"))
    return is_script_file(file)


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame and those that called it, without those of libraries."""
    while frame is not None:
        if is_user_frame(frame):
            yield frame
        frame = frame.f_back


def frames_outside(frame: FrameType | None) -> list[FrameType]:
    """The user's frames from this one up; without any, those of the libraries that stand in for them."""
    above: list[FrameType] = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OWN):
            above.append(frame)
        frame = frame.f_back
    return [here for here in above if is_user_frame(here)] or above


def frame_of_block(frame: FrameType) -> FrameType:
    """Return the frame of the script, or of an integration, whose block is entered or left from this frame.

    A library may stand in between: `contextlib.ExitStack`.
    """
    here: FrameType | None = frame
    while here is not None and not (is_user_frame(here) or is_file_of_relight(here.f_code.co_filename)):
        here = here.f_back
    return here or frame


@functools.cache
def _parsed(name: str) -> ast.Module | None:
    lines = linecache.getlines(name)
    try:
        return in_usual_words(ast.parse("".join(lines), name)) if lines else None
    except (SyntaxError, ValueError):
        return None


@functools.cache
def node_of(code: CodeType) -> ast.AST | None:
    """The module, function or lambda that a code object was compiled from."""
    tree = _parsed(code.co_filename)
    if tree is None:
        return None
    if code.co_name == "<module>":
        return tree
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS)
        and getattr(node, "name", "<lambda>") == code.co_name
        and _first_line(node) == code.co_firstlineno
    ]
    return found[0] if len(found) == 1 else None


def _first_line(node: ast.AST) -> int:
    lines: list[int] = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
    return min(lines, default=getattr(node, "lineno", 0))


def children_of(node: ast.stmt | ast.AST) -> list[list[ast.stmt]]:
    """The lists of statements directly inside a compound statement."""
    found: list[list[ast.stmt]] = [
        part for name in ("body", "orelse", "finalbody") if isinstance(part := getattr(node, name, None), list)
    ]
    found += [handler.body for handler in getattr(node, "handlers", [])]
    found += [case.body for case in getattr(node, "cases", [])]
    return found


def body_of(node: ast.AST | None) -> list[ast.stmt]:
    """The statements of a function or module; a lambda has none."""
    body = getattr(node, "body", [])
    return body if isinstance(body, list) else []


class Position(NamedTuple):
    """A place in a file: a line, and a column, without which statements of one line are not told apart."""

    line: int
    column: int | None = None

    def is_before(self, statement: ast.stmt) -> bool:
        """Return whether a statement begins after this place."""
        return self.line < statement.lineno or (
            self.column is not None and self.line == statement.lineno and self.column < statement.col_offset
        )

    def is_in(self, statement: ast.stmt) -> bool:
        """Return whether this place lies in a statement."""
        end, end_column = statement.end_lineno or statement.lineno, statement.end_col_offset
        if self.line == end and self.column is not None and end_column is not None and self.column >= end_column:
            return False
        return self.line <= end and not self.is_before(statement)


class Head(NamedTuple):
    """The head of a loop: the code of the function that it stands in, and its place there."""

    code: CodeType
    position: Position


def position_of(frame: FrameType) -> Position:
    """Return where the instruction stands that a frame is at."""
    at = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None, None, None, None))
    return Position(frame.f_lineno, at[2] if at[0] == frame.f_lineno else None)


def way_to(body: list[ast.stmt], position: Position) -> Way:
    """From the outermost to the innermost statement that contains a place: (its list, its place in the list)."""
    for index, statement in enumerate(body):
        if position.is_in(statement):
            if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
                return []  # another frame's
            for inner in children_of(statement):
                if deeper := way_to(inner, position):
                    return [(body, index), *deeper]
            return [(body, index)]
    return []


def loop_at(way: Way, head: Head) -> int | None:
    """Return the part of a way that is the loop with this head; None: the way does not lead through it."""
    loops = [i for i, (body, at) in enumerate(way) if isinstance(body[at], LOOPS) and head.position.is_in(body[at])]
    return max((i for i in loops if is_head(way[i][0][way[i][1]], head.position)), default=None)


def target_of(head: Head) -> str:
    """Return the variable of the `for` loop with this head; empty: it has others beside it, or cannot be read."""
    way = way_to(body_of(node_of(head.code)), head.position)
    at = loop_at(way, head)
    loop = None if at is None else way[at][0][way[at][1]]
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
        return ""
    used = {node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name)}
    return "" if used & {"enumerate", "zip", "map", "reversed"} else loop.target.id


def heads(statement: ast.stmt) -> list[ast.stmt]:
    """Expressions that a statement evaluates before its body, as statements: a value that decides is a condition."""
    parts: list[ast.stmt] = []
    if isinstance(statement, (ast.If, ast.While)):
        parts.append(condition(statement.test))
    elif isinstance(statement, (ast.For, ast.AsyncFor)):
        parts.append(ast.Assign([statement.target], ast.Constant(None)))
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        parts += [condition(item.context_expr) for item in statement.items]
    elif isinstance(statement, ast.Match):
        parts.append(condition(statement.subject))
    return [placed(part, statement) for part in parts]


def placed(part: ast.stmt, at: ast.stmt) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(part, at))


def condition(value: ast.expr) -> ast.stmt:
    return ast.While(value, [ast.Pass()], [])


def up_to_entered(way: Way, line: int) -> Way:
    """The way to the innermost `with` that is being entered at this line; its block may begin on the same line."""
    for index in reversed(range(len(way))):
        body, at = way[index]
        entered = body[at]
        if isinstance(entered, ast.With) and entered.lineno <= line <= entered.body[0].lineno:
            return way[: index + 1]
    return []


def statements_of(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of one function, in order."""
    for statement in body:
        yield statement
        if not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            for inner in children_of(statement):
                yield from statements_of(inner)


def is_head(loop: ast.stmt, position: Position) -> bool:
    """Return whether a place belongs to what a loop evaluates once, before its first turn or after its last."""
    body: list[ast.stmt] = getattr(loop, "body", [])
    after: list[ast.stmt] = getattr(loop, "orelse", [])
    return (isinstance(loop, ast.For) and position.is_before(body[0])) or bool(
        after and not position.is_before(after[0])
    )


def source_of(modules: Iterable[str]) -> str:
    """Return the code of these modules."""
    return "\n".join("".join(_lines_in(name)) for name in sorted(modules))


def mentioned(modules: Iterable[str], pattern: str) -> str:
    """Return FILE:LINE of the first place in these modules that a pattern matches; empty: there is none."""
    for name in sorted(modules):
        for number, line in enumerate(_lines_in(name), 1):
            if re.search(pattern, line):
                return f"{short(sys.modules[name].__file__ or '')}:{number}"
    return ""


def _lines_in(module: str) -> list[str]:
    file = getattr(sys.modules.get(module), "__file__", None)
    return linecache.getlines(file) if file else []


def lines_of(frame: FrameType) -> list[tuple[str, int]]:
    """File and line of each user frame from this one up."""
    return [(here.f_code.co_filename, here.f_lineno) for here in user_frames(frame)]


def short(name: str) -> str:
    """A file's name as a message shows it."""
    return Path(name).name
