"""The code between two epochs, where the loop of steps stands in a loop of epochs: it runs in some turns of the former.

That is the code after the loop of steps, up to the end of the outer loop's body; the outer loop's head; and the code
above the loop of steps. The outer loop may stand in a function that calls the one with the loop of steps.
"""

import ast
import dataclasses
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from relight.training.carried.code import source
from relight.training.carried.code.iteration import Iteration, Piece, preceding, read_after
from relight.training.carried.code.needed import needed_by, read_in
from relight.training.carried.code.source import Head, Way


class _Level(NamedTuple):
    """A function on the way from the loop of steps up to the loop of epochs."""

    frame: FrameType
    up: int  # how many frames lie between that of the loop of steps and this one
    way: Way  # to the loop of steps, or to the call that leads there
    epochs: int | None  # the part of the way that is the loop of epochs; None: it stands further up


class Variable(NamedTuple):
    """A variable that stands for the number of the epoch."""

    frame: FrameType
    up: int  # how many frames lie between that of the loop of steps and this one
    name: str


def with_epochs(whole: Iteration, frame: FrameType, epochs: Head) -> Iteration | None:
    """Add the code between two epochs to an iteration of the loop of steps. None: the source is not found.

    `frame` holds the loop of steps. `epochs`: the head of the loop of epochs.
    """
    levels = _levels(frame, whole.way, epochs)
    if not levels:
        return None
    ends: list[Piece] = []
    begins: list[Piece] = []
    read = set(whole.read_after)
    for index, level in enumerate(levels):
        number = whole.loop + level.up
        inner = level.way if level.epochs is None else level.way[level.epochs + 1 :]
        last = _last(inner)  # the loop of steps, or a call that has returned
        ended = [last] if index else list(getattr(last, "orelse", []))
        ended += [one for body, at in reversed(inner) for one in body[at + 1 :]]
        read |= needed_by(ended)
        ends.append(Piece(number, _in_some_turns(ended)))
        if index:
            called = levels[index - 1]
            begins.insert(0, Piece(whole.loop + called.up, _in_some_turns(_parameters(called, level))))
        begins.insert(0, Piece(number, _in_some_turns(preceding(inner))))
    outermost = levels[-1]
    to_epochs = outermost.way[: (outermost.epochs or 0) + 1]
    head = Piece(whole.loop + outermost.up, _in_some_turns(source.heads(_last(to_epochs))))
    return dataclasses.replace(
        whole,
        pieces=(*whole.pieces, *ends, head, *begins),
        in_each_turn=len(whole.pieces),
        is_only_block=False,
        frames=whole.loop + outermost.up + 1,
        read_after=frozenset(read) | read_after(to_epochs),
        of_epoch=tuple((whole.loop + one.up, one.name) for one in _variables(levels, epochs)),
    )


def variables_of_epoch(frame: FrameType, epochs: Head) -> list[Variable]:
    """Return the loop's variable, and parameters on the way to the loop of steps that stand for the same number.

    `frame` asks for a step, at the head of the loop of steps.
    """
    node = source.node_of(frame.f_code)
    way = source.way_to(source.body_of(node), source.position_of(frame))
    return _variables(_levels(frame, way, epochs), epochs)


def _levels(frame: FrameType, way: Way, epochs: Head) -> list[_Level]:
    """Return the functions from the loop of steps, to which a way leads in this frame, up; none: no source is found."""
    levels: list[_Level] = []
    here: FrameType | None = frame
    up = 0
    while here is not None:
        if levels:
            node = source.node_of(here.f_code)
            way = [] if node is None else source.way_to(source.body_of(node), source.position_of(here))
        if not way:
            return []
        levels.append(_Level(here, up, way, source.loop_at(way, epochs) if here.f_code is epochs.code else None))
        if levels[-1].epochs is not None:
            return levels
        here, up = here.f_back, up + 1
        while here is not None and not source.is_user_frame(here):
            here, up = here.f_back, up + 1
    return []


def _last(way: Way) -> ast.stmt:
    """Return the statement that a way leads to."""
    body, at = way[-1]
    return body[at]


def _given(called: _Level, caller: _Level) -> list[tuple[str, ast.expr]]:
    """Return the parameters of the called function with what the call gives them, as far as the code shows it."""
    code = called.frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = names[int(bool(names) and names[0] in ("self", "cls")) :]
    for node in ast.walk(_last(caller.way)):
        if isinstance(node, ast.Call) and code.co_name in (getattr(node.func, name, "") for name in ("id", "attr")):
            keywords = [(one.arg, one.value) for one in node.keywords if one.arg in names]
            return [*zip(positional, node.args, strict=False), *((name, value) for name, value in keywords if name)]
    return []


def _parameters(called: _Level, caller: _Level) -> list[ast.stmt]:
    """Return assignments to the parameters that may get another value with each call.

    Those that get a name which the code around the call sets nowhere do not.
    """
    around = caller.way[0][0] if caller.epochs is None else [_last(caller.way[: caller.epochs + 1])]
    stored = _stored_in(around)
    given = _given(called, caller)
    anew = [ast.Name(name, ast.Store()) for name, value in given if not stored.isdisjoint(read_in(value))]
    return [source.placed(ast.Assign([name], ast.Constant(None)), _last(caller.way)) for name in anew]


def _variables(levels: Sequence[_Level], epochs: Head) -> list[Variable]:
    found: list[Variable] = []
    same: set[str] = set()
    for index in reversed(range(len(levels))):
        level = levels[index]
        if level.epochs is not None:
            same = {source.target_of(epochs)}
        else:
            stored = _stored_in(source.body_of(source.node_of(level.frame.f_code)))
            given = _given(level, levels[index + 1])
            names = ((name, value.id) for name, value in given if isinstance(value, ast.Name))
            same = {name for name, value in names if value in same and name not in stored}
        found += [Variable(level.frame, level.up, name) for name in sorted(same)]
    return found


def _stored_in(statements: list[ast.stmt]) -> set[str]:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}


def _in_some_turns(statements: list[ast.stmt]) -> tuple[ast.stmt, ...]:
    """These statements, as a case that may apply or not."""
    if not statements:
        return ()
    case = ast.match_case(ast.MatchAs(), None, statements)
    return (source.placed(ast.Match(ast.Constant(None), [case]), statements[0]),)
