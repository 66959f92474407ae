"""The loop of steps of a script, and where code can be added."""

import ast
import random
from collections.abc import Callable
from typing import NamedTuple

from tests.idioms.reshaped.scopes import Scope, parts

EPOCH = "epoch_number"  # has to stay a variable of its own
Shape = Callable[[ast.Module, Scope, random.Random], None]


class NotForThis(Exception):
    """This script cannot have this shape."""


class Loop(NamedTuple):
    """The loop of steps of a script, with its block; `step` is the name of its variable."""

    loop: ast.For
    block: ast.With
    step: str


def loop_of(scope: Scope) -> Loop:
    """Return the loop of steps in a scope."""
    for loop in parts(scope.body):
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name):
            for block in loop.body:
                if isinstance(block, ast.With) and _is_named(block.items[0].context_expr, loop.target.id):
                    return Loop(loop, block, loop.target.id)
    raise NotForThis


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def is_function(scope: Scope) -> bool:
    """Return whether it is no module."""
    return isinstance(scope, ast.FunctionDef)


def is_called(node: ast.Call, names: set[str]) -> bool:
    """Return whether a call is one of these functions."""
    return isinstance(node.func, ast.Name) and node.func.id in names


def statement_with(scope: Scope, inner: ast.AST) -> int:
    """Return the place of the scope's statement that contains a part."""
    return next(i for i, one in enumerate(scope.body) if any(node is inner for node in ast.walk(one)))


def before(scope: Scope, loop: ast.For, function: ast.stmt) -> None:
    """Define a function where the scope's statement with a loop begins."""
    scope.body.insert(statement_with(scope, loop), function)


def begin_with(scope: Scope, source: str) -> None:
    """Begin a scope with these lines, after its docstring; in a module, after its imports."""
    at = 1 if isinstance(scope.body[0], ast.Expr) and isinstance(scope.body[0].value, ast.Constant) else 0
    if not is_function(scope):
        at = max([at, *(1 + i for i, one in enumerate(scope.body) if isinstance(one, (ast.Import, ast.ImportFrom)))])
    scope.body[at:at] = ast.parse(source).body


def instead(scope: Scope, old: ast.stmt, new: list[ast.stmt]) -> None:
    """Put statements in the place of one, wherever in the scope it stands."""
    for node in parts(scope.body):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and old in body:
                body[body.index(old) : body.index(old) + 1] = new
                return
    scope.body[scope.body.index(old) : scope.body.index(old) + 1] = new


def leaves_loop(body: list[ast.stmt]) -> bool:
    """Return whether `break` or `continue` of a loop around stands in these statements."""
    for statement in body:
        if isinstance(statement, (ast.Break, ast.Continue)):
            return True
        if isinstance(statement, (ast.For, ast.While)):
            if leaves_loop(statement.orelse):
                return True
            continue
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            if leaves_loop(getattr(statement, field, [])):
                return True
        if any(leaves_loop(handler.body) for handler in getattr(statement, "handlers", [])):
            return True
    return False
