"""The source of a running script: which statements an iteration of its loop of steps executes, and in which order.

Everything here reads code and changes nothing. A frame whose source cannot be read (made by `exec`, rewritten by the
compiler) has no answer: None.
"""

import ast
import functools
import linecache
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_ASYNC_FLAGS = 0x80 | 0x200  # coroutines and asynchronous generators
_LIBRARIES = tuple(
    str(Path(path).resolve()) + "/"
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OWN = str(Path(__file__).parents[1]) + "/"


@dataclass(frozen=True)
class Piece:
    """Statements that one of the frames executes in an iteration; `frame` counts up from that of `with step`."""

    frame: int
    statements: tuple[ast.stmt, ...]


@dataclass(frozen=True)
class Iteration:
    """One turn of the loop of steps, from the entry of `with step` to the next entry; the first piece is the block."""

    pieces: tuple[Piece, ...]
    turn: int  # so many of the pieces come before the loop's next turn
    counted: frozenset[str]  # names that the loop itself sets, beside the step
    frames: int  # how many frames take part: 1 if `with step` stands in the function that holds the loop


@functools.cache
def is_user_file(name: str) -> bool:
    """Whether a file belongs to the user: not to Python, an installed package, or relight."""
    if not name or name.startswith("<"):
        return False
    path = str(Path(name).resolve())
    return not path.startswith((*_LIBRARIES, _OWN)) and "/site-packages/" not in path


def is_user_frame(frame: FrameType) -> bool:
    return is_user_file(frame.f_code.co_filename)


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame and those that called it, without those of libraries."""
    while frame is not None:
        if is_user_frame(frame):
            yield frame
        frame = frame.f_back


@functools.cache
def _parsed(name: str) -> ast.Module | None:
    lines = linecache.getlines(name)
    try:
        return ast.parse("".join(lines), name) if lines else None
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
    for part in parts:
        ast.copy_location(part, statement)
        ast.fix_missing_locations(part)
    return parts


def _condition(value: ast.expr) -> ast.stmt:
    return ast.While(value, [ast.Pass()], [])


def _targets(statement: ast.With) -> list[ast.stmt]:
    """What entering a `with` sets."""
    parts: list[ast.stmt] = [
        ast.copy_location(ast.Assign([item.optional_vars], ast.Constant(None)), statement)
        for item in statement.items
        if item.optional_vars is not None
    ]
    for part in parts:
        ast.fix_missing_locations(part)
    return parts


def _counted(loop: ast.stmt) -> frozenset[str]:
    """Names that a loop sets beside the step: by `enumerate`, `zip` and the like."""
    if not isinstance(loop, ast.For) or isinstance(loop.target, ast.Name):
        return frozenset()
    return frozenset(node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name))


def _up_to_entered(way: list[tuple[list[ast.stmt], int]], line: int) -> list[tuple[list[ast.stmt], int]]:
    """The way to the innermost `with` that is being entered at this line; its block may begin on the same line."""
    for index in reversed(range(len(way))):
        body, at = way[index]
        entered = body[at]
        if isinstance(entered, ast.With) and entered.lineno <= line <= entered.body[0].lineno:
            return way[: index + 1]
    return []


def iteration_of(frame: FrameType) -> Iteration | None:
    """The iteration that the frame of a `with step` is in. None if its source, or its loop, is not found."""
    after: list[Piece] = []
    before: list[Piece] = []
    number = 0
    here: FrameType | None = frame
    while here is not None:
        if not is_user_frame(here):
            here = here.f_back  # a library that calls the script's function back
            number += 1
            continue
        node = node_of(here.f_code)
        if node is None or isinstance(node, ast.Lambda):
            return None
        way = _way_to(getattr(node, "body", []), here.f_lineno)
        if number == 0:
            way = _up_to_entered(way, here.f_lineno)
        if not way:
            return None
        loop = max((i for i, (body, at) in enumerate(way) if isinstance(body[at], _LOOPS)), default=None)
        if loop is not None and loop == len(way) - 1:
            loop = None  # the line is the loop's own head: something that it calls
        inner = way if loop is None else way[loop + 1 :]
        body, at = inner[-1]
        if number == 0:
            entered = body[at]
            assert isinstance(entered, ast.With)
            after.append(Piece(0, (*_targets(entered), *entered.body)))
        else:
            after.append(Piece(number, (body[at],)))  # the call itself: what it does with the result
        for body, at in reversed(inner):
            after.append(Piece(number, tuple(body[at + 1 :])))
        prior: list[ast.stmt] = []
        for index, (body, at) in enumerate(inner):
            prior += body[:at]
            if index < len(inner) - 1 or number == 0:
                prior += _heads(body[at])
        if loop is not None:
            body, at = way[loop]
            before.insert(0, Piece(number, (*_heads(body[at]), *prior)))
            return Iteration((*after, *before), len(after), _counted(body[at]), number + 1)
        before.insert(0, Piece(number, tuple(prior)))
        here = here.f_back
        number += 1
    return None


def loops_around(frame: FrameType, built_at: Sequence[tuple[str, int]] = ()) -> str | None:
    """FILE:LINE of the innermost loop that would call `training.steps()` again, or None.

    `frame` is the one that iterates over the steps. `built_at`, from `lines_of` where `relight.Training` was made,
    leaves out loops that make a new one in each turn.
    """
    for depth, here in enumerate(user_frames(frame)):
        node = node_of(here.f_code)
        if node is None or isinstance(node, ast.Lambda):
            continue
        way = _way_to(getattr(node, "body", []), here.f_lineno)
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
    iteration = iteration_of(frame)
    if iteration is None:
        return None
    block = iteration.pieces[0].statements
    for statement in block:
        if not isinstance(statement, ast.If) or not _counts(statement.test):
            continue
        if not _calls(statement.body, "step", is_optimizer) or _calls([statement], "backward"):
            continue
        others = [other for other in block if other is not statement]
        if _calls(others, "backward") and not _calls(others, "zero_grad"):
            return f"{short(frame.f_code.co_filename)}:{statement.lineno}"
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
