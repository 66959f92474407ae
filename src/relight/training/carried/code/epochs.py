"""The code between two epochs, where the loop of steps stands in a loop of epochs: it runs in some turns of the former.

That is the code after the loop of steps, up to the end of the outer loop's body; the outer loop's head; and the code
above the loop of steps. The outer loop may stand in a function that calls the one with the loop of steps.
"""

import ast
import dataclasses
from types import CodeType, FrameType
from typing import NamedTuple

from relight.training.carried.code import source
from relight.training.carried.code.iteration import Iteration, Piece, preceding, read_after, read_in
from relight.training.carried.code.source import Head, Way


class _Call(NamedTuple):
    """A call on the way from the loop of epochs to the loop of steps."""

    called: CodeType
    number: int  # of the called frame
    way: Way  # to the call, in the function that calls


def with_epochs(whole: Iteration, frame: FrameType, epochs: Head) -> Iteration | None:
    """Add the code between two epochs to an iteration of the loop of steps. None: the source is not found.

    `frame` holds the loop of steps. `epochs`: the head of the loop of epochs.
    """
    ends: list[Piece] = []
    begins: list[Piece] = []
    calls: list[_Call] = []
    read = set(whole.read_after)
    number, here, way = whole.loop, frame, whole.way
    while True:
        outer = source.loop_at(way, epochs) if here.f_code is epochs.code else None
        inner = way if outer is None else way[outer + 1 :]
        last = inner[-1][0][inner[-1][1]]  # the loop of steps, or a call that has returned
        ended = [last] if calls else list(getattr(last, "orelse", []))
        ended += [one for body, at in reversed(inner) for one in body[at + 1 :]]
        read |= set[str]().union(*map(read_in, ended))
        ends.append(Piece(number, _in_some_turns(ended)))
        begins.insert(0, Piece(number, _in_some_turns(preceding(inner))))
        if outer is not None:
            break
        called, caller = here, _caller(here)
        if caller is None:
            return None
        here, number = caller[0], number + caller[1]
        node = source.node_of(here.f_code)
        way = [] if node is None else source.way_to(source.body_of(node), source.position_of(here))
        if not way:
            return None
        calls.append(_Call(called.f_code, number - caller[1], way))
        begins.insert(0, Piece(number - caller[1], _in_some_turns(_parameters(calls[-1], epochs, here))))
    loop = way[outer][0][way[outer][1]]
    head = Piece(number, _in_some_turns(source.heads(loop)))
    return dataclasses.replace(
        whole,
        pieces=(*whole.pieces, *ends, head, *begins),
        is_only_block=False,
        frames=number + 1,
        read_after=frozenset(read) | read_after(way[: outer + 1]),
        of_epoch=_names_of_epoch(number, source.target_of(epochs), calls),
    )


def _caller(frame: FrameType) -> tuple[FrameType, int] | None:
    """Return the user's frame that has called this one, perhaps through a library, and how far up that is."""
    here, far = frame.f_back, 1
    while here is not None and not source.is_user_frame(here):
        here, far = here.f_back, far + 1
    return None if here is None else (here, far)


def _given(call: _Call) -> list[tuple[str, ast.expr]]:
    """Return the parameters of the called function with what the call gives them, as far as the code shows it."""
    code, statement = call.called, call.way[-1][0][call.way[-1][1]]
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = names[int(bool(names) and names[0] in ("self", "cls")) :]
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and code.co_name in (getattr(node.func, name, "") for name in ("id", "attr")):
            keywords = [(one.arg, one.value) for one in node.keywords if one.arg in names]
            return [*zip(positional, node.args, strict=False), *((name, value) for name, value in keywords if name)]
    return []


def _parameters(call: _Call, epochs: Head, caller: FrameType) -> list[ast.stmt]:
    """Return assignments to the parameters that may get another value with each call.

    Those that get a name which the code around the call sets nowhere do not.
    """
    outer = source.loop_at(call.way, epochs) if caller.f_code is epochs.code else None
    body, at_loop = call.way[outer or 0]
    stored = _stored_in(body if outer is None else [body[at_loop]])
    anew = [ast.Name(name, ast.Store()) for name, value in _given(call) if not stored.isdisjoint(read_in(value))]
    at = call.way[-1][0][call.way[-1][1]]
    return [source.placed(ast.Assign([name], ast.Constant(None)), at) for name in anew]


def _names_of_epoch(number: int, target: str, calls: list[_Call]) -> tuple[tuple[int, str], ...]:
    """Return the loop's variable, and parameters on the way to the loop of steps that stand for the same number."""
    found, same = [(number, target)], {target}
    for call in reversed(calls):
        stored = _stored_in(source.body_of(source.node_of(call.called)))
        given = ((name, value.id) for name, value in _given(call) if isinstance(value, ast.Name))
        same = {name for name, value in given if value in same and name not in stored}
        found += [(call.number, name) for name in sorted(same)]
    return tuple(found)


def _stored_in(statements: list[ast.stmt]) -> set[str]:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}


def _in_some_turns(statements: list[ast.stmt]) -> tuple[ast.stmt, ...]:
    """These statements, as a case that may apply or not."""
    if not statements:
        return ()
    case = ast.match_case(ast.MatchAs(), None, statements)
    return (source.placed(ast.Match(ast.Constant(None), [case]), statements[0]),)
