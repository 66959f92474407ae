"""Scripts that are refused for what their code shows: two loops of steps, accumulation by hand, a `yield` inside."""

import ast
import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from types import FrameType, FunctionType

from relight.training.carried.code import source
from relight.training.carried.code.iteration import iteration_of
from relight.training.carried.code.known import never_true, value_of
from relight.training.carried.code.source import Head

_COUNTING = (zip, itertools.islice, itertools.zip_longest, itertools.chain, itertools.takewhile)


def another_loop(frame: FrameType, built_at: Sequence[tuple[str, int]]) -> str | None:
    """Return words for a message that say where `training.steps()` or `epochs()` would be called again, or None.

    `frame` is the one that calls it now; `built_at` as for `loops_around`.
    """
    if place := loops_around(frame, built_at):
        return f"stands inside another loop ({place})"
    if place := loop_after(frame):
        return f"is called a second time, for the loop in {place}"
    return None


def loops_around(frame: FrameType, built_at: Sequence[tuple[str, int]] = (), epochs: Head | None = None) -> str | None:
    """FILE:LINE of the innermost loop that would call `training.steps()` again, or None.

    `frame` is the one that iterates over the steps. `built_at`, from `lines_of` where `relight.Training` was made,
    leaves out loops that make a new one in each turn, unless these certainly come to a second one. `epochs`: the head
    of the loop of epochs, each of which calls it once; loops around that one are not looked at.
    """
    is_certain = True  # each turn of a loop comes here
    for depth, here in enumerate(source.user_frames(frame)):
        node = source.node_of(here.f_code)
        if node is None or isinstance(node, ast.Lambda):
            is_certain = False
            continue
        position = source.position_of(here)
        way = source.way_to(source.body_of(node), position)
        loops = [body[at] for body, at in way if isinstance(body[at], source.LOOPS)]
        if depth == 0 and loops and way[-1][0][way[-1][1]] is loops[-1]:
            loops = loops[:-1]  # the loop over the steps themselves: this line is its head
        for loop in reversed(loops):
            if source.is_head(loop, position):
                continue
            if _is_at(loop, here, epochs):
                return None
            below = way[1 + max(i for i, (body, at) in enumerate(way) if body[at] is loop) :]
            turns_again = is_certain and _is_straight(below) and _turns_again(loop, here)
            if _holds(loop, here, built_at) and not turns_again:
                continue
            return f"{source.short(here.f_code.co_filename)}:{loop.lineno}"
        is_certain = is_certain and _is_straight(way)
    return None


def leaves_epoch(frame: FrameType, epochs: Head) -> str | None:
    """FILE:LINE of a statement that leaves the loop of steps, but not that of epochs, in the middle of one; or None.

    `frame` stands at the head of the loop of steps.
    """
    around: Sequence[ast.stmt] = ()  # the body of the loop of epochs
    leaving: list[ast.stmt] = []
    inner: ast.stmt | None = None
    for here in source.user_frames(frame):
        node = source.node_of(here.f_code)
        if node is None or isinstance(node, ast.Lambda):
            return None
        way = source.way_to(source.body_of(node), source.position_of(here))
        outer = source.loop_at(way, epochs) if here.f_code is epochs.code else None
        if inner is None:
            if not way or not isinstance(inner := way[-1][0][way[-1][1]], source.LOOPS):
                return None
            is_never = functools.partial(never_true, frame=frame, loop=inner.body)
            leaving = _breaks(inner.body, returns=outer is None, is_never=is_never)
        if outer is not None:
            around = getattr(way[outer][0][way[outer][1]], "body", ())
            break
    leaves_both = [one for one in _breaks(around, returns=True) if one not in leaving]
    if inner is None or not leaving or leaves_both:
        return None
    return f"{source.short(frame.f_code.co_filename)}:{leaving[0].lineno}"


def _breaks(
    body: Sequence[ast.stmt], *, returns: bool, is_never: Callable[[ast.expr], bool] = lambda _: False
) -> list[ast.stmt]:
    """Return the statements that leave the loop with this body: `break`, and `return` if that is asked for.

    `is_never` returns whether a condition never holds.
    """
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Break) or (returns and isinstance(statement, ast.Return)):
            found.append(statement)
        elif isinstance(statement, source.LOOPS):
            if returns:
                inner = source.statements_of([statement])
                found += [one for one in inner if isinstance(one, ast.Return)]
            found += _breaks(statement.orelse, returns=returns, is_never=is_never)
        elif not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            skipped = statement.body if isinstance(statement, ast.If) and is_never(statement.test) else None
            parts = [part for part in source.children_of(statement) if part is not skipped]
            found += [one for part in parts for one in _breaks(part, returns=returns, is_never=is_never)]
    return found


def _is_straight(way: Sequence[tuple[list[ast.stmt], int]]) -> bool:
    """Return whether the code on a way comes to its end whenever it begins it."""
    kinds = (ast.If, ast.Match, ast.While, ast.Try)
    return not any(isinstance(body[at], kinds) or any(map(_may_return, body[:at])) for body, at in way)


def _turns_again(loop: ast.stmt, frame: FrameType) -> bool:
    """Return whether a loop over a list or range certainly has two turns: nothing in its body ends it, or tries."""
    if not isinstance(loop, ast.For):
        return False
    ends = (ast.Break, ast.Return, ast.Raise, ast.Try, ast.Continue)
    if any(isinstance(statement, ends) for statement in source.statements_of(loop.body)):
        return False
    match loop.iter:
        case ast.Call(func=ast.Name(id="range"), args=given, keywords=[]):
            numbers = [value_of(one, frame) for one in given]
            return all(type(number) is int for number in numbers) and len(range(*numbers)) > 1
        case ast.Call(func=ast.Name(id="enumerate"), args=[given, *_]):
            values = value_of(given, frame)
        case given:
            values = value_of(given, frame)
    return isinstance(values, (list, tuple, range, dict, str)) and len(values) > 1


def loop_after(frame: FrameType) -> str | None:
    """FILE:LINE of a second loop of steps, which the script certainly comes to after this one; or None.

    `frame` is the one that calls `training.steps()`. The second loop may stand in a function that a caller calls next.
    A `return` on the way there, also in a branch, makes it uncertain.
    """
    for here in source.user_frames(frame):
        node = source.node_of(here.f_code)
        if node is None or isinstance(node, ast.Lambda):
            continue
        for body, at in reversed(source.way_to(source.body_of(node), source.position_of(here))):
            if _may_return(body[at]):
                return None
            for statement in body[at + 1 :]:
                if _steps_through(statement) or any(map(_steps_through, _called_by(statement, here))):
                    return f"{source.short(here.f_code.co_filename)}:{statement.lineno}"
                if isinstance(statement, (ast.Raise, ast.Break, ast.Continue)) or _may_return(statement):
                    return None
    return None


def _may_return(statement: ast.AST) -> bool:
    """Return whether a statement may leave the function that it stands in before its end."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return False
    return isinstance(statement, ast.Return) or any(map(_may_return, ast.iter_child_nodes(statement)))


def _steps_through(statement: ast.stmt) -> bool:
    """Return whether a statement is a loop over `training.steps(until=...)` or `training.epochs(...)`."""
    match statement:
        case ast.For(iter=ast.Call(func=ast.Attribute(attr="steps"), keywords=keywords)):
            return any(keyword.arg == "until" for keyword in keywords)
        case ast.For(iter=ast.Call(func=ast.Attribute(value=ast.Name(id="training"), attr="epochs"))):
            return True
    return False


def _called_by(statement: ast.stmt, frame: FrameType) -> list[ast.stmt]:
    """Return the statements of the script's function that a statement calls; none if it calls no such function."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))) | ast.Assign(value=ast.Call(func=ast.Name(id=name))):
            function = frame.f_locals.get(name, frame.f_globals.get(name))
            return source.body_of(source.node_of(function.__code__) if isinstance(function, FunctionType) else None)
    return []


def takes_steps_in(frame: FrameType, called_at: Sequence[tuple[str, int]]) -> str | None:
    """FILE:LINE of a `for` loop, in whose turns the script takes steps that were offered outside it; or None.

    The loop would go on with each attempt at a step, not with each step; so would one over `zip` or `islice`. `frame`
    is the one that asks for a step; `called_at`, from `lines_of`, is where `training.steps()` was called.
    """
    node = source.node_of(frame.f_code) if source.is_user_frame(frame) else None
    if node is None or isinstance(node, ast.Lambda):
        return None
    position = source.position_of(frame)
    for body, at in reversed(source.way_to(source.body_of(node), position)):
        loop = body[at]
        if not isinstance(loop, (ast.For, ast.AsyncFor)):
            continue
        if source.is_head(loop, position):
            if _counts_turns(loop.iter, frame):
                return f"{source.short(frame.f_code.co_filename)}:{loop.lineno}"
        elif not _holds(loop, frame, called_at):
            return f"{source.short(frame.f_code.co_filename)}:{loop.lineno}"
    return None


def _counts_turns(over: ast.expr, frame: FrameType) -> bool:
    """Return whether a loop goes over an iterator that takes from others beside the steps, or only so many of them."""
    if isinstance(over, ast.Name):
        return type(frame.f_locals.get(over.id, frame.f_globals.get(over.id))) in _COUNTING
    name = over.func if isinstance(over, ast.Call) else None
    return (getattr(name, "attr", "") or getattr(name, "id", "")) in {kind.__name__ for kind in _COUNTING}


def _is_at(loop: ast.stmt, frame: FrameType, head: Head | None) -> bool:
    """Return whether a loop of this frame has this head."""
    if head is None or frame.f_code is not head.code:
        return False
    return head.position.is_in(loop) and source.is_head(loop, head.position)


def _holds(loop: ast.stmt, frame: FrameType, places: Sequence[tuple[str, int]]) -> bool:
    """Return whether one of these lines stands in a loop of this frame."""
    lines = range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)
    return any(name == frame.f_code.co_filename and line in lines for name, line in places)


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
            return f"{source.short(frame.f_code.co_filename)}:{statement.lineno}"
    return None


def yields_inside(frame: FrameType) -> str | None:
    """FILE:LINE of a `yield` in the block of the `with step` in this frame, or None; context managers may have one."""
    node = source.node_of(frame.f_code)
    way = source.up_to_entered(source.way_to(source.body_of(node), source.position_of(frame)), frame.f_lineno)
    caller = frame.f_back
    if not way or (caller is not None and caller.f_code.co_filename == contextlib.__file__):
        return None
    block = way[-1][0][way[-1][1]]
    for statement in source.statements_of(getattr(block, "body", [])):
        for part in [statement] if not source.children_of(statement) else source.heads(statement):
            for inner in ast.walk(part):
                if isinstance(inner, (ast.Yield, ast.YieldFrom)):
                    return f"{source.short(frame.f_code.co_filename)}:{inner.lineno}"
    return None


def returns_from(frame: FrameType) -> str | None:
    """FILE:LINE of a `return` with a value in the block of the `with step` in this frame, or None.

    The caller of the function needs the value, and an interrupted block gives none. A loop around the block goes on.
    """
    node = source.node_of(frame.f_code)
    way = source.up_to_entered(source.way_to(source.body_of(node), source.position_of(frame)), frame.f_lineno)
    if not way or any(isinstance(body[at], source.LOOPS) for body, at in way):
        return None
    block = way[-1][0][way[-1][1]]
    for statement in source.statements_of(getattr(block, "body", [])):
        if isinstance(statement, ast.Return) and not _is_none(statement.value):
            return f"{source.short(frame.f_code.co_filename)}:{statement.lineno}"
    return None


def _is_none(value: ast.expr | None) -> bool:
    """Return whether a `return` gives nothing."""
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _counts(test: ast.expr) -> bool:
    """Return whether a condition holds in every so many steps."""
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
