"""Expressions whose values are known before a loop begins, and branches in it that are never taken."""

import argparse
import ast
import contextlib
import dataclasses
import operator
import types
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any

_UNKNOWN = object()
_SETTINGS = (argparse.Namespace, types.SimpleNamespace)  # and dataclasses: attributes of these stay, mostly
_PLAIN = (bool, int, float, str, type(None))
_COMPARES: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def value_of(expression: ast.expr, frame: FrameType) -> Any:
    """Return the value of a constant, a name, a name's attribute or a list of constants; None: not known."""
    found = _value(expression, frame)
    return None if found is _UNKNOWN else found


def never_true(test: ast.expr, frame: FrameType, loop: Sequence[ast.stmt]) -> bool:
    """Return whether a condition in a loop is false by settings alone, which nothing in the loop changes.

    `if args.dry_run:`, `if args.max_steps > 0 and step >= args.max_steps:`. `loop`: its body.
    """
    stored = [one for statement in loop for one in ast.walk(statement) if isinstance(one, (ast.Name, ast.Attribute))]
    changed = {getattr(one, "id", getattr(one, "attr", "")) for one in stored if isinstance(one.ctx, ast.Store)}
    return _outcome(test, frame, changed) is False


def _outcome(test: ast.expr, frame: FrameType, changed: Collection[str]) -> bool | None:
    """Return whether a condition holds; None: not known."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            holds = _outcome(inner, frame, changed)
            return None if holds is None else not holds
        case ast.BoolOp(op=op, values=values):
            deciding = isinstance(op, ast.Or)  # one of these is enough
            outcomes = {_outcome(one, frame, changed) for one in values}
            return deciding if deciding in outcomes else None if None in outcomes else not deciding
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARES:
            both = [_setting(one, frame, changed) for one in (left, right)]
            if _UNKNOWN in both:
                return None
            with contextlib.suppress(TypeError):
                return bool(_COMPARES[type(op)](*both))
            return None
    found = _setting(test, frame, changed)
    return None if found is _UNKNOWN else bool(found)


def _setting(expression: ast.expr, frame: FrameType, changed: Collection[str]) -> Any:
    """Return a plain value that the loop does not change, or _UNKNOWN."""
    match expression:
        case ast.Name(id=name) if name in changed:
            return _UNKNOWN
        case ast.Attribute(value=ast.Name() as owner, attr=name):
            holder = _value(owner, frame)
            if name in changed or not (isinstance(holder, _SETTINGS) or dataclasses.is_dataclass(holder)):
                return _UNKNOWN
    found = _value(expression, frame)
    return found if isinstance(found, _PLAIN) else _UNKNOWN


def _value(expression: ast.expr, frame: FrameType) -> Any:
    match expression:
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name, _UNKNOWN))
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            owner = frame.f_locals.get(name, frame.f_globals.get(name))
            return getattr(owner, "__dict__", {}).get(attribute, _UNKNOWN)
    with contextlib.suppress(ValueError):
        return ast.literal_eval(expression)
    return _UNKNOWN
