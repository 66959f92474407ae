"""Scripts that train twice in one process, found in their code as the first training begins.

A job has one loop of steps. A script that comes to a second one would end there, after hours perhaps.
"""

import ast
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from relight.script_files import is_script_file

_LOOPS = (ast.For, ast.AsyncFor)
_BRANCHES = (ast.If, ast.IfExp, ast.While, ast.Match, ast.ExceptHandler)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def comes_again(method: str, kind: type) -> str | None:
    """FILE:LINE where the script comes to `method` of an object of this kind again; None: its code shows none.

    Called from that method. A `return`, or a `break` out of the loop, on the way there makes it uncertain: None.
    """
    here: FrameType | None = sys._getframe(1)
    call: _Call = _OfMethod(method, kind)
    while here is not None:
        if is_script_file(here.f_code.co_filename) and not _is_method_of(here, kind):
            way = _way_in(here)
            line = _second_line(way, here, call)
            if line is not None:
                return f"{here.f_code.co_filename}:{line}"
            if _branches(way):
                return None  # called again, the function may take another way
            call = _OfFunction(here.f_code.co_name)
        here = here.f_back
    return None


@dataclass(frozen=True)
class _OfFunction:
    """A call of a function of the script."""

    name: str

    def is_made_by(self, node: ast.AST, _frame: FrameType, _following: list[ast.stmt]) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == self.name


@dataclass(frozen=True)
class _OfMethod:
    """A call of a method of an object of some class."""

    name: str
    kind: type

    def is_made_by(self, node: ast.AST, frame: FrameType, following: list[ast.stmt]) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=self.name)):
                now: Any = frame.f_locals.get(owner, frame.f_globals.get(owner))
                return isinstance(now, self.kind) or any(_makes(each, owner, self.kind) for each in following)
        return False


_Call = _OfFunction | _OfMethod


def _is_method_of(frame: FrameType, kind: type) -> bool:
    """Return whether a frame is that of a method of such an object: of a subclass in the script, say."""
    code = frame.f_code
    return code.co_argcount > 0 and isinstance(frame.f_locals.get(code.co_varnames[0]), kind)


def _way_in(frame: FrameType) -> list[tuple[list[ast.stmt], int]]:
    """The blocks that lead to the line of a frame, from the outermost one, with the place of the statement in each."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        body = _body_of(ast.parse(source), frame.f_code)
    except SyntaxError:
        return []
    column = list(frame.f_code.co_positions())[frame.f_lasti // 2][2]
    return list(_way(body, (frame.f_lineno, column or 0)))


def _second_line(way: list[tuple[list[ast.stmt], int]], frame: FrameType, call: _Call) -> int | None:
    """The line of a loop around the call that runs, or of a statement after it that makes it again."""
    for depth, (block, at) in reversed(list(enumerate(way))):
        statement = block[at]
        is_certain = not _branches(way[depth + 1 :]) and frame.f_lineno > statement.lineno
        if is_certain and isinstance(statement, _LOOPS) and not _may_leave(statement.body):
            return statement.lineno if _has_turns(statement.iter, frame) else None
        following = block[at + 1 :]
        for later in following:
            if any(call.is_made_by(each, frame, following) for each in _certain(later)):
                return later.lineno
            if _may_leave([later]):
                return None
    return None


def _has_turns(iterated: ast.expr, frame: FrameType) -> bool:
    """Return whether a loop over this has more than one turn, as far as can be said without asking an iterator."""
    try:
        found = _value(iterated, frame)
        return not isinstance(found, (range, list, tuple, dict, set)) or len(found) > 1
    except (AttributeError, KeyError, TypeError, ValueError):
        return True


def _value(node: ast.expr, frame: FrameType) -> Any:
    """The value of a constant, a variable, its attribute, or a range of these; None: of something else."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return frame.f_locals[name] if name in frame.f_locals else frame.f_globals[name]
        case ast.Attribute(value=owner, attr=name):
            return getattr(_value(owner, frame), name)
        case ast.Call(func=ast.Name(id="range"), args=parts):
            return range(*(_value(part, frame) for part in parts))
        case ast.List(elts=elements) | ast.Tuple(elts=elements) if not any(
            isinstance(e, ast.Starred) for e in elements
        ):
            return elements
    return None


def _branches(way: list[tuple[list[ast.stmt], int]]) -> bool:
    """Return whether it is decided on the way whether the call is made."""
    return any(isinstance(block[at], _BRANCHES) for block, at in way)


def _body_of(tree: ast.Module, code: CodeType) -> list[ast.stmt]:
    """The statements of a function, or of the module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node.body
    return tree.body if code.co_name == "<module>" else []


def _way(body: list[ast.stmt], place: tuple[int, int]) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield the blocks that lead to a line and column; a line may have several statements."""
    for at, statement in enumerate(body):
        end = statement.end_lineno or statement.lineno, statement.end_col_offset or 0
        if (statement.lineno, statement.col_offset) <= place < end:
            yield body, at
            for field in ("body", "orelse", "finalbody"):
                yield from _way(getattr(statement, field, []), place)
            for handler in getattr(statement, "handlers", []):
                yield from _way(handler.body, place)


def _certain(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement that run with it, whatever happens."""
    if isinstance(statement, (*_SCOPES, *_BRANCHES)):
        return
    yield statement
    for child in ast.iter_child_nodes(statement):
        yield from _certain(child)


def _may_leave(body: list[ast.stmt]) -> bool:
    """Return whether statements may leave their function or loop."""
    return any(map(_leaves, body))


def _leaves(node: ast.AST) -> bool:
    if isinstance(node, _SCOPES):
        return False
    return isinstance(node, (ast.Return, ast.Break, ast.Raise)) or any(map(_leaves, ast.iter_child_nodes(node)))


def _makes(statement: ast.stmt, owner: str, kind: type) -> bool:
    """Return whether a statement is `owner = SomeTrainer(...)`."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=called)):
            return name == owner and ast.unparse(called).endswith(kind.__name__)
    return False
