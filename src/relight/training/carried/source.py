"""The source of a running script: which statements an iteration of its loop of steps executes, and in which order.

Everything here reads code and changes nothing. A frame whose source cannot be read (made by `exec`, rewritten by the
compiler) has no answer: None.
"""

import ast
import contextlib
import dataclasses
import functools
import linecache
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from relight.training.carried.normal import in_usual_words

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_ASYNC_FLAGS = 0x80 | 0x200  # coroutines and asynchronous generators
_LIBRARIES = tuple(
    str(Path(path).resolve()) + "/"
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OWN = str(Path(__file__).parents[1]) + "/"
_PACKAGE = str(Path(__file__).parents[2]) + "/"


@dataclass(frozen=True)
class Piece:
    """Statements that one of the frames executes in an iteration; `frame` counts up from that of `with step`."""

    frame: int
    statements: tuple[ast.stmt, ...]


@dataclass(frozen=True)
class Iteration:
    """One turn of the loop of steps, from where it asks for a step to where it asks for the next one."""

    pieces: tuple[Piece, ...]
    block: ast.With
    begins_late: bool  # the turn's first statements run before the loop asks for a step
    computes_above: bool  # code stands between the loop's head and `with step`
    is_only_block: bool  # the loop's body is `with step` and nothing else
    counted: frozenset[str]  # names that the loop itself sets, beside the step
    frames: int  # how many frames take part: 1 if `with step` stands in the function that holds the loop
    read_after: frozenset[str] = frozenset()  # names that the function with the loop reads after it

    def enters(self, node: ast.With | ast.AsyncWith) -> bool:
        """Whether a statement of the loop is `with step`; there may be several, one in each branch."""
        if node is self.block:
            return True
        names = {ast.unparse(item.context_expr) for item in self.block.items}
        return self.frames == 1 and any(ast.unparse(item.context_expr) in names for item in node.items)


@functools.cache
def is_user_file(name: str) -> bool:
    """Whether a file belongs to the user: not to Python, an installed package, or relight."""
    if not name or name.startswith("<"):
        return False
    path = str(Path(name).resolve())
    return not path.startswith((*_LIBRARIES, _PACKAGE)) and "/site-packages/" not in path


def is_user_frame(frame: FrameType) -> bool:
    return is_user_file(frame.f_code.co_filename)


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
    if tree is None or code.co_flags & _ASYNC_FLAGS:
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


def _body_of(node: ast.AST | None) -> list[ast.stmt]:
    """The statements of a function or module; a lambda has none."""
    body = getattr(node, "body", [])
    return body if isinstance(body, list) else []


def _way_to(body: list[ast.stmt], line: int) -> list[tuple[list[ast.stmt], int]]:
    """From the outermost to the innermost statement that contains `line`: (its list, its place in the list)."""
    for index, statement in enumerate(body):
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
                return []  # another frame's
            for inner in children_of(statement):
                if deeper := _way_to(inner, line):
                    return [(body, index), *deeper]
            return [(body, index)]
    return []


def _heads(statement: ast.stmt) -> list[ast.stmt]:
    """What a compound statement evaluates before its body, as statements: a value that decides is a condition."""
    parts: list[ast.stmt] = []
    if isinstance(statement, (ast.If, ast.While)):
        parts.append(_condition(statement.test))
    elif isinstance(statement, (ast.For, ast.AsyncFor)):
        parts.append(ast.Assign([statement.target], ast.Constant(None)))
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        parts += [_condition(item.context_expr) for item in statement.items]
    elif isinstance(statement, ast.Match):
        parts.append(_condition(statement.subject))
    return [_placed(part, statement) for part in parts]


def _placed(part: ast.stmt, at: ast.stmt) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(part, at))


def _turn_of(loop: ast.stmt, counted: frozenset[str]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """What the head of a loop does at the start of a turn, and what counts as done at its end: names that it counts."""
    if not isinstance(loop, ast.For):
        return _heads(loop), []
    names = [node for node in ast.walk(loop.target) if isinstance(node, ast.Name)]
    first: list[ast.expr] = [name for name in names if name.id not in counted]
    last: list[ast.expr] = [name for name in names if name.id in counted]
    return _unset(first, loop), _unset(last, loop)


def _unset(names: list[ast.expr], at: ast.stmt) -> list[ast.stmt]:
    return [_placed(ast.Assign(names, ast.Constant(None)), at)] if names else []


def _condition(value: ast.expr) -> ast.stmt:
    return ast.While(value, [ast.Pass()], [])


def _counted(loop: ast.stmt, block: ast.With) -> frozenset[str]:
    """Names that a loop sets beside the step: by `enumerate`, `zip` and the like."""
    if not isinstance(loop, ast.For) or isinstance(loop.target, ast.Name):
        return frozenset()
    entered = {item.context_expr.id for item in block.items if isinstance(item.context_expr, ast.Name)}
    return frozenset(node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)) - entered


def _up_to_entered(way: list[tuple[list[ast.stmt], int]], line: int) -> list[tuple[list[ast.stmt], int]]:
    """The way to the innermost `with` that is being entered at this line; its block may begin on the same line."""
    for index in reversed(range(len(way))):
        body, at = way[index]
        entered = body[at]
        if isinstance(entered, ast.With) and entered.lineno <= line <= entered.body[0].lineno:
            return way[: index + 1]
    return []


def block_ahead(frame: FrameType) -> int | None:
    """The line of the `with step` that a turn of this frame's loop comes to. None: the code here does not show it.

    The frame is at the head of a `for` over the steps.
    """
    node = node_of(frame.f_code)
    way = _way_to(_body_of(node), frame.f_lineno)
    if not way:
        return None
    body, at = way[-1]
    loop = body[at]
    if not isinstance(loop, ast.For) or not _is_head(loop, frame.f_lineno):
        return None
    names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    for statement in _statements(loop.body):
        if isinstance(statement, ast.With):
            entered = [item.context_expr for item in statement.items]
            if any(isinstance(one, ast.Name) and one.id in names for one in entered):
                return statement.lineno
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of one function, in order."""
    for statement in body:
        yield statement
        if not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            for inner in children_of(statement):
                yield from _statements(inner)


def iteration_of(frame: FrameType, asked_at: Mapping[CodeType, int], line: int = 0) -> Iteration | None:
    """The iteration that the frame of a `with step` is in. None if its source, or its loop, is not found.

    `asked_at`: for the code of each frame that asked for the step, its line then. `line`: of the `with`, if the frame
    does not stand there yet.
    """
    after: list[Piece] = []
    before: list[Piece] = []
    number = 0
    block: ast.With | None = None
    here: FrameType | None = frame
    while here is not None:
        if not is_user_frame(here):
            here = here.f_back  # a library that calls the script's function back
            number += 1
            continue
        node = node_of(here.f_code)
        if node is None or isinstance(node, ast.Lambda):
            return None
        at_line = line if number == 0 and line else here.f_lineno
        way = _way_to(_body_of(node), at_line)
        if number == 0:
            way = _up_to_entered(way, at_line)
        if not way:
            return None
        asked = asked_at.get(here.f_code, 0)
        loops = [i for i, (body, at) in enumerate(way) if isinstance(body[at], _LOOPS) and _spans(body[at], asked)]
        loop = max(loops, default=None)
        if loop is not None and loop == len(way) - 1:
            loop = None  # the line is the loop's own head: something that it calls
        inner = way if loop is None else way[loop + 1 :]
        call = inner[-1][0][inner[-1][1]]
        if isinstance(call, ast.With) and number == 0:
            block = call
        if block is None:
            return None  # the block stands in a library
        if loop is not None and number == 0:
            return dataclasses.replace(_of_loop(way[loop], block, asked), read_after=_read_after(way[: loop + 1]))
        after.append(Piece(number, (call,)))  # the block, or the call that leads to it with what follows its return
        for body, at in reversed(inner):
            after.append(Piece(number, tuple(body[at + 1 :])))
        prior: list[ast.stmt] = []
        for index, (body, at) in enumerate(inner):
            prior += body[:at]
            if index < len(inner) - 1:
                prior += _heads(body[at])
        if loop is not None:
            whole = _of_loop(way[loop], block, asked)
            first, last = _turn_of(way[loop][0][way[loop][1]], whole.counted)
            pieces = (Piece(number, (*first, *prior)), *before, *after, Piece(number, tuple(last)))
            above = whole.begins_late or bool(prior) or any(piece.statements for piece in before)
            return dataclasses.replace(
                whole,
                pieces=pieces,
                computes_above=above,
                is_only_block=False,
                frames=number + 1,
                read_after=_read_after(way[: loop + 1]),
            )
        before.insert(0, Piece(number, tuple(prior)))
        here = here.f_back
        number += 1
    return None


def _of_loop(place: tuple[list[ast.stmt], int], block: ast.With, asked: int) -> Iteration:
    """All of a loop's body. `asked`: the line that asks for a step; 0: not known."""
    loop = place[0][place[1]]
    counted = _counted(loop, block)
    first, last = _turn_of(loop, counted)
    body = getattr(loop, "body", [])
    begins_late = bool(asked) and not _is_head(loop, asked)
    pieces = (Piece(0, (*first, *body, *last)),)
    above = begins_late or body[0] is not block
    is_only_block = isinstance(loop, ast.For) and not above and len(body) == 1
    return Iteration(pieces, block, begins_late, above, is_only_block, counted, 1)


def _read_after(way: list[tuple[list[ast.stmt], int]]) -> frozenset[str]:
    """Names that are read after the last statement of this way, in the same function."""
    following = [statement for body, at in way for statement in body[at + 1 :]]
    return frozenset(
        node.id
        for statement in following
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )


def _spans(statement: ast.stmt, line: int) -> bool:
    """Whether a line lies in a statement; also if it is not known."""
    return not line or statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def loops_around(frame: FrameType, built_at: Sequence[tuple[str, int]] = ()) -> str | None:
    """FILE:LINE of the innermost loop that would call `training.steps()` again, or None.

    `frame` is the one that iterates over the steps. `built_at`, from `lines_of` where `relight.Training` was made,
    leaves out loops that make a new one in each turn.
    """
    for depth, here in enumerate(user_frames(frame)):
        node = node_of(here.f_code)
        if node is None or isinstance(node, ast.Lambda):
            continue
        way = _way_to(_body_of(node), here.f_lineno)
        loops = [body[at] for body, at in way if isinstance(body[at], _LOOPS)]
        if depth == 0 and loops and way[-1][0][way[-1][1]] is loops[-1]:
            loops = loops[:-1]  # the loop over the steps themselves: this line is its head
        for loop in reversed(loops):
            if _is_head(loop, here.f_lineno):
                continue
            lines = range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)
            if any(name == here.f_code.co_filename and line in lines for name, line in built_at):
                continue
            return f"{short(here.f_code.co_filename)}:{loop.lineno}"
    return None


def _is_head(loop: ast.stmt, line: int) -> bool:
    """Whether a line belongs to what a loop evaluates once, before its first turn."""
    body: list[ast.stmt] = getattr(loop, "body", [])
    after: list[ast.stmt] = getattr(loop, "orelse", [])
    return (isinstance(loop, ast.For) and line < body[0].lineno) or bool(after and line >= after[0].lineno)


def lines_of(frame: FrameType) -> list[tuple[str, int]]:
    """File and line of each user frame from this one up."""
    return [(here.f_code.co_filename, here.f_lineno) for here in user_frames(frame)]


def short(name: str) -> str:
    """A file's name as a message shows it."""
    return Path(name).name


def accumulates_by_hand(frame: FrameType, is_optimizer: Callable[[ast.expr], bool]) -> str | None:
    """FILE:LINE of an `optimizer.step()` that only some steps reach, while each of them adds to the gradients; or None.

    `frame` is that of `with step`. `is_optimizer` says whether an expression names an optimizer.
    """
    iteration = iteration_of(frame, {})
    if iteration is None:
        return None
    block = iteration.block.body
    for statement in block:
        if not isinstance(statement, ast.If) or not _counts(statement.test):
            continue
        if not _calls(statement.body, "step", is_optimizer) or _calls([statement], "backward"):
            continue
        others = [other for other in block if other is not statement]
        if _calls(others, "backward") and not _calls(others, "zero_grad"):
            return f"{short(frame.f_code.co_filename)}:{statement.lineno}"
    return None


def yields_inside(frame: FrameType) -> str | None:
    """FILE:LINE of a `yield` in the block of the `with step` in this frame, or None; context managers may have one."""
    node = node_of(frame.f_code)
    way = _up_to_entered(_way_to(_body_of(node), frame.f_lineno), frame.f_lineno)
    caller = frame.f_back
    if not way or (caller is not None and caller.f_code.co_filename == contextlib.__file__):
        return None
    block = way[-1][0][way[-1][1]]
    for statement in _statements(getattr(block, "body", [])):
        for part in [statement] if not children_of(statement) else _heads(statement):
            for inner in ast.walk(part):
                if isinstance(inner, (ast.Yield, ast.YieldFrom)):
                    return f"{short(frame.f_code.co_filename)}:{inner.lineno}"
    return None


def _counts(test: ast.expr) -> bool:
    """Whether a condition holds in every so many steps."""
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.BitAnd)) for node in ast.walk(test))


def _calls(statements: Sequence[ast.stmt], name: str, on: Callable[[ast.expr], bool] = lambda _: True) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
        and on(node.func.value)
        for statement in statements
        for node in ast.walk(statement)
    )
