"""The statements that an iteration of a loop of steps executes, in their order."""

import ast
import dataclasses
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from relight.training.carried.code import source
from relight.training.carried.code.needed import needed_by
from relight.training.carried.code.source import Position, Way

_ONLY_PASS_ON = ("enumerate", "iter", "tqdm", "tqdm.tqdm", "itertools.islice", "islice")


@dataclass(frozen=True)
class Piece:
    """Statements that one of the frames executes in an iteration; `frame` counts up from that of `with step`."""

    frame: int
    statements: tuple[ast.stmt, ...]


@dataclass(frozen=True)
class Iteration:
    """One turn of the loop of steps, from where it asks for a step to where it asks for the next one."""

    way: Way  # to the loop, in the function that holds it
    pieces: tuple[Piece, ...]
    block: ast.With
    begins_late: bool  # the turn's first statements run before the loop asks for a step
    computes_above: bool  # code runs between the loop's head and the step's block
    is_only_block: bool  # the loop's body is `with step` and nothing else
    counted: frozenset[str]  # names that the loop itself sets, beside the step
    read_after: frozenset[str]  # names that code after the loop, in its function, needs from it
    loop: int = 0  # the number of the frame that holds the loop: 0 if `with step` stands in it
    frames: int = 1  # how many frames take part: those up to the one that holds the loop, or the loop of epochs
    in_each_turn: int | None = None  # so many pieces; the others run between two epochs. None: all
    of_epoch: tuple[tuple[int, str], ...] = ()  # names of the epoch's number, each with the number of its frame

    @property
    def may_leave(self) -> bool:
        """True if a turn may leave the loop, by `break` or `return`."""
        return any(_leaves(statement) for piece in self.pieces for statement in piece.statements)

    def makes_anew(self, name: str, function: Any) -> bool:
        """Return whether a turn makes a function that `name` then stands for, as the one that it stands for was made.

        A `lambda` or `def` in the loop does, and a call of the function in which that one was defined.
        """
        made_in = getattr(function, "__qualname__", "").partition(".<locals>")[0].rpartition(".")[2]
        if isinstance(function, functools.partial):
            made_in = "partial"
        for node in (inner for piece in self.pieces for one in piece.statements for inner in ast.walk(one)):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return True
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                called = node.value.func if isinstance(node.value, ast.Call) else None
                if isinstance(node.value, ast.Lambda) or (called and made_in == ast.unparse(called).rpartition(".")[2]):
                    return True
        return False

    def enters(self, node: ast.With | ast.AsyncWith) -> bool:
        """Return whether a statement of the loop is `with step`; there may be several, one in each branch."""
        if node is self.block:
            return True
        names = {ast.unparse(item.context_expr) for item in self.block.items}
        return self.loop == 0 and any(ast.unparse(item.context_expr) in names for item in node.items)


def iteration_of(frame: FrameType, asked_at: Mapping[CodeType, Position], line: int = 0) -> Iteration | None:
    """The iteration that the frame of a `with step` is in. None if its source, or its loop, is not found.

    `asked_at`: for the code of each frame that asked for the step, its place then. `line`: of the `with`, if the frame
    does not stand there yet.
    """
    after: list[Piece] = []
    before: list[Piece] = []
    number = 0
    block: ast.With | None = None
    here: FrameType | None = frame
    while here is not None:
        if not source.is_user_frame(here):
            here = here.f_back  # a library that calls the script's function back
            number += 1
            continue
        node = source.node_of(here.f_code)
        if node is None or isinstance(node, ast.Lambda):
            return None
        at = Position(line) if number == 0 and line else source.position_of(here)
        way = source.way_to(source.body_of(node), at)
        if number == 0:
            way = source.up_to_entered(way, at.line)
        if not way:
            return None
        asked = asked_at.get(here.f_code)
        loop = _innermost_loop(way, asked)
        inner = way if loop is None else way[loop + 1 :]
        call = inner[-1][0][inner[-1][1]]
        if isinstance(call, ast.With) and number == 0:
            block = call
        if block is None:
            return None  # the block stands in a library
        if loop is not None and number == 0:
            return _of_loop(way[: loop + 1], block, asked)
        after.append(Piece(number, (call,)))  # the block, or the call that leads to it with what follows its return
        for body, index in reversed(inner):
            after.append(Piece(number, tuple(body[index + 1 :])))
        prior = preceding(inner)
        if loop is not None:
            whole = _of_loop(way[: loop + 1], block, asked)
            first, last = _turn_of(way[loop][0][way[loop][1]], whole.counted)
            pieces = (Piece(number, (*first, *prior)), *before, *after, Piece(number, tuple(last)))
            above = whole.begins_late or any(_computes(one) for piece in before for one in piece.statements)
            above = above or any(map(_computes, prior)) or _enters_before(block, frozenset())
            return dataclasses.replace(
                whole, pieces=pieces, computes_above=above, is_only_block=False, loop=number, frames=number + 1
            )
        before.insert(0, Piece(number, tuple(prior)))
        here = here.f_back
        number += 1
    return None


def block_ahead(frame: FrameType) -> int | None:
    """The line of the `with step` that a turn of this frame's loop comes to. None: the code here does not show it.

    The frame is at the head of a `for` over the steps.
    """
    node = source.node_of(frame.f_code)
    way = source.way_to(source.body_of(node), position := source.position_of(frame))
    if not way:
        return None
    body, at = way[-1]
    loop = body[at]
    if not isinstance(loop, ast.For) or not source.is_head(loop, position):
        return None
    names = set(map(ast.unparse, _targets(loop)))
    for statement in source.statements_of(loop.body):
        if isinstance(statement, ast.With) and any(ast.unparse(one.context_expr) in names for one in statement.items):
            return statement.lineno
    return None


def _innermost_loop(way: Way, asked: Position | None) -> int | None:
    """Return the part of a way that is the loop which asks for a step at a place; None: any."""
    loops = [i for i, (body, at) in enumerate(way) if isinstance(body[at], source.LOOPS) and _spans(body[at], asked)]
    loop = max(loops, default=None)
    return None if loop == len(way) - 1 else loop  # this line is the loop's own head: something that it calls


def preceding(way: Way) -> list[ast.stmt]:
    """Statements that run on this way before its last one."""
    prior: list[ast.stmt] = []
    for index, (body, at) in enumerate(way):
        prior += body[:at]
        if index < len(way) - 1:
            prior += source.heads(body[at])
    return prior


def _computes(statement: ast.stmt) -> bool:
    """Return whether a statement above the block does anything: declarations and texts do not."""
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return not is_text and not isinstance(statement, (ast.Global, ast.Nonlocal, ast.Pass))


def _of_loop(way: Way, block: ast.With, asked: Position | None) -> Iteration:
    """All of a loop's body. `way`: to the loop. `asked`: the place that asks for a step; None: not known."""
    loop = way[-1][0][way[-1][1]]
    counted = _counted(loop, block)
    first, last = _turn_of(loop, counted)
    body = getattr(loop, "body", [])
    begins_late = asked is not None and not source.is_head(loop, asked)
    pieces = (Piece(0, (*first, *body, *last)),)
    above = begins_late or block not in body or any(map(_computes, body[: body.index(block)]))
    names = {ast.unparse(one) for one in ast.walk(getattr(loop, "target", block)) if isinstance(one, ast.expr)}
    above = above or _head_computes(loop) or _enters_before(block, names)
    is_only_block = isinstance(loop, ast.For) and not above and len(body) == 1
    return Iteration(way, pieces, block, begins_late, above, is_only_block, counted, read_after(way))


def _head_computes(loop: ast.stmt) -> bool:
    """Return whether the head may run code after it has asked for a step: `map(prepare, training.steps())`."""
    iterated = getattr(loop, "iter", None)
    while isinstance(iterated, ast.Call) and iterated.args and ast.unparse(iterated.func) in _ONLY_PASS_ON:
        iterated = iterated.args[0]
    is_asking = isinstance(iterated, ast.Call) and ast.unparse(iterated.func).rpartition(".")[2] == "steps"
    return iterated is not None and not is_asking


def _enters_before(block: ast.With, steps: Collection[str]) -> bool:
    """Return whether the statement may enter something else before the step, which is one of these expressions."""
    first = block.items[0].context_expr
    return len(block.items) > 1 and ast.unparse(first) not in steps


def _turn_of(loop: ast.stmt, counted: frozenset[str]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The effect of a loop's head at the start of a turn, and the names that it counts at its end."""
    if not isinstance(loop, ast.For):
        return source.heads(loop), []
    first = [target for target in _targets(loop) if ast.unparse(target) not in counted]
    last = [target for target in _targets(loop) if ast.unparse(target) in counted]
    return _unset(first, loop), _unset(last, loop)


def _unset(names: list[ast.expr], at: ast.stmt) -> list[ast.stmt]:
    return [source.placed(ast.Assign(names, ast.Constant(None)), at)] if names else []


def _targets(loop: ast.For) -> list[ast.expr]:
    """Return what the head of a loop sets: names and attributes (`for self.step in ...`)."""
    nodes = (node for node in ast.walk(loop.target) if isinstance(node, (ast.Name, ast.Attribute)))
    return [node for node in nodes if isinstance(node.ctx, ast.Store)]


def _counted(loop: ast.stmt, block: ast.With) -> frozenset[str]:
    """Names that a loop sets beside the step: by `enumerate`, `zip` and the like."""
    if not isinstance(loop, ast.For) or isinstance(loop.target, ast.Name):
        return frozenset()
    entered = {ast.unparse(item.context_expr) for item in block.items}
    return frozenset(target.id for target in _targets(loop) if isinstance(target, ast.Name)) - entered


def read_after(way: Way) -> frozenset[str]:
    """Names that code after the last statement of this way needs from before, in the same function."""
    return frozenset().union(*(needed_by(body[at + 1 :]) for body, at in way))


def _leaves(node: ast.AST) -> bool:
    """True if a statement may leave the loop that it stands in: not one of its own, or a function that it defines."""
    if isinstance(node, (ast.Break, ast.Return)):
        return True
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return False
    inner = ast.walk(node) if isinstance(node, source.LOOPS) else ast.iter_child_nodes(node)
    if isinstance(node, source.LOOPS):
        return any(isinstance(each, ast.Return) for each in inner)
    return any(map(_leaves, inner))


def _spans(statement: ast.stmt, position: Position | None) -> bool:
    """Return whether a place lies in a statement; also if it is not known."""
    return position is None or position.is_in(statement)
