"""Other shapes of a script: where its loop keeps variables, and how its block is reached.

Each shape takes the tree of a script and the function (or module) with the loop, and changes both in place. It raises
NotForThis where a script cannot have the shape. What the script computes stays the same.
"""

import ast
import random
from collections.abc import Callable
from typing import NamedTuple

from tests.idioms.reshaped.scopes import Rename, Scope, bound_otherwise, parts, stored

Shape = Callable[[ast.Module, Scope, random.Random], None]
_HOLDER = "kept"


class NotForThis(Exception):
    """This script cannot have this shape."""


# --- where variables live -----------------------------------------------------------------------------------------
def _chosen(scope: Scope, draw: random.Random) -> list[str]:
    arguments = (
        {one.arg for one in ast.walk(scope.args) if isinstance(one, ast.arg)}
        if isinstance(scope, ast.FunctionDef)
        else set()
    )
    if any(
        isinstance(node, ast.Call) and _is_called(node, {"locals", "vars", "globals", "eval", "exec"})
        for node in ast.walk(scope)
    ):
        raise NotForThis
    names = sorted(stored(scope.body) - bound_otherwise(scope.body) - arguments - {loop_of(scope).step})
    share = draw.choice((0.4, 0.7, 1.0))
    chosen = [name for name in names if draw.random() < share]
    if not chosen:
        raise NotForThis
    return chosen


def _is_function(scope: Scope) -> bool:
    return isinstance(scope, ast.FunctionDef)


def _is_called(node: ast.Call, names: set[str]) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in names


def _move(scope: Scope, names: list[str], expression: Callable[[str, ast.expr_context], ast.expr]) -> None:
    for node in parts(scope.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in names:
            node.simple = 0
    rename = Rename(set(names), expression)
    scope.body = [rename.visit(statement) for statement in scope.body]


def _begin_with(scope: Scope, source: str) -> None:
    at = 1 if isinstance(scope.body[0], ast.Expr) and isinstance(scope.body[0].value, ast.Constant) else 0
    if not _is_function(scope):
        at = max([at, *(1 + i for i, one in enumerate(scope.body) if isinstance(one, (ast.Import, ast.ImportFrom)))])
    scope.body[at:at] = ast.parse(source).body


def _in_module(tree: ast.Module, source: str) -> None:
    _begin_with(tree, source)


def _attribute(name: str, context: ast.expr_context) -> ast.expr:
    return ast.Attribute(ast.Name(_HOLDER, ast.Load()), name, context)


def in_object(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of an object of the script's own class."""
    names = _chosen(scope, draw)
    _move(scope, names, _attribute)
    _begin_with(scope, f"{_HOLDER} = Keeper()")
    _in_module(tree, "class Keeper:\n    pass")


def in_slots(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Slots of an object."""
    names = _chosen(scope, draw)
    _move(scope, names, _attribute)
    _begin_with(scope, f"{_HOLDER} = Keeper()")
    _in_module(tree, f"class Keeper:\n    __slots__ = {tuple(names)!r}")


def in_class(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of a class."""
    _move(scope, _chosen(scope, draw), _attribute)
    _in_module(tree, f"class {_HOLDER}:\n    pass")


def in_namespace(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of an `argparse.Namespace`, which other functions of the script could share."""
    _move(scope, _chosen(scope, draw), _attribute)
    _in_module(tree, f"import argparse\n{_HOLDER} = argparse.Namespace()")


def in_nested_object(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of an object that another one has."""

    def inner(name: str, context: ast.expr_context) -> ast.expr:
        return ast.Attribute(_attribute("inner", ast.Load()), name, context)

    _move(scope, _chosen(scope, draw), inner)
    _begin_with(scope, f"{_HOLDER} = Keeper()\n{_HOLDER}.inner = Keeper()")
    _in_module(tree, "class Keeper:\n    pass")


def in_dictionary(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Items of a dictionary."""

    def item(name: str, context: ast.expr_context) -> ast.expr:
        return ast.Subscript(ast.Name(_HOLDER, ast.Load()), ast.Constant(name), context)

    _move(scope, _chosen(scope, draw), item)
    _begin_with(scope, f"{_HOLDER} = {{}}")


def in_list(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Items of a list."""
    names = _chosen(scope, draw)

    def item(name: str, context: ast.expr_context) -> ast.expr:
        return ast.Subscript(ast.Name(_HOLDER, ast.Load()), ast.Constant(names.index(name)), context)

    _move(scope, names, item)
    _begin_with(scope, f"{_HOLDER} = [None] * {len(names)}")


def in_globals(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Names of the module instead of the function's own."""
    if not _is_function(scope):
        raise NotForThis
    names = set(_chosen(scope, draw))
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & stored(tree.body)
    renamed = {name: f"the_{name}" for name in names - taken}
    if not renamed:
        raise NotForThis
    _move(scope, sorted(renamed), lambda name, context: ast.Name(renamed[name], context))
    for node in ast.walk(scope):  # functions inside see them as globals, and may set them
        if isinstance(node, ast.FunctionDef):
            inside = sorted(
                {one.id for one in parts(node.body) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
                & {*renamed.values()}
            )
            if inside:
                node.body.insert(0, ast.Global(inside))


def in_closure(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Variables of a function around that of the loop."""
    if not _is_function(scope) or scope not in tree.body:
        raise NotForThis
    names = sorted(set(_chosen(scope, draw)))
    at = tree.body.index(scope)
    outer = ast.parse(f"def make_{scope.name}():\n    {' = '.join(names)} = None\n    return {scope.name}").body[0]
    assert isinstance(outer, ast.FunctionDef)
    scope.body.insert(0, ast.Nonlocal(names))
    outer.body.insert(1, scope)
    tree.body[at : at + 1] = [outer, *ast.parse(f"{scope.name} = make_{scope.name}()").body]


# --- how the block is reached -------------------------------------------------------------------------------------
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


def _into_function(scope: Scope, body: list[ast.stmt], name: str, *given: str) -> tuple[ast.FunctionDef, ast.stmt]:
    """Return a function with these statements of a scope, for the same variables, and a call of it."""
    if any(isinstance(node, (ast.Yield, ast.YieldFrom, ast.Return)) for node in parts(body)):
        raise NotForThis
    names = sorted((stored(body) | bound_otherwise(body)) - {*given})
    function = ast.parse(f"def {name}({', '.join(given)}):\n    pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = list(body)
    if names:
        function.body.insert(0, ast.Nonlocal(names) if _is_function(scope) else ast.Global(names))
        if _is_function(scope):
            scope.body[:0] = ast.parse(f"if False:\n    {' = '.join(names)} = None").body
    return function, ast.parse(f"{name}({', '.join(given)})").body[0]


def _leaves_loop(body: list[ast.stmt]) -> bool:
    """Return whether `break` or `continue` of a loop around stands in these statements."""
    for statement in body:
        if isinstance(statement, (ast.Break, ast.Continue)):
            return True
        if isinstance(statement, (ast.For, ast.While)):
            if _leaves_loop(statement.orelse):
                return True
            continue
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            if _leaves_loop(getattr(statement, field, [])):
                return True
        if any(_leaves_loop(handler.body) for handler in getattr(statement, "handlers", [])):
            return True
    return False


def block_in_function(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The block in a function of its own, which the loop calls."""
    loop, block, step = loop_of(scope)
    if _leaves_loop(block.body):
        raise NotForThis
    function, call = _into_function(scope, [block], "attempt", step)
    loop.body[loop.body.index(block)] = call
    _before(scope, loop, function)


def turn_in_function(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """All of the loop's body in a function."""
    loop, _, step = loop_of(scope)
    if _leaves_loop(loop.body):
        raise NotForThis
    function, call = _into_function(scope, loop.body, "turn", step)
    loop.body = [call]
    _before(scope, loop, function)


def body_in_function(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The statements of the block in a function, which does not see the step."""
    loop, block, _ = loop_of(scope)
    if _leaves_loop(block.body):
        raise NotForThis
    function, call = _into_function(scope, block.body, "compute")
    block.body = [call]
    _before(scope, loop, function)


def _before(scope: Scope, loop: ast.For, function: ast.stmt) -> None:
    """Define a function where the scope's statement with a loop begins."""
    at = next(i for i, one in enumerate(scope.body) if any(inner is loop for inner in ast.walk(one)))
    scope.body.insert(at, function)


def steps_through_generator(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Steps from a generator of the script's own."""
    loop, _, _ = loop_of(scope)
    _in_module(
        tree,
        draw.choice(
            ("def each(steps):\n    yield from steps", "def each(steps):\n    for step in steps:\n        yield step")
        ),
    )
    loop.iter = ast.Call(ast.Name("each", ast.Load()), [loop.iter], [])


def steps_counted(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """`for number, step in enumerate(...)`."""
    loop, _, _ = loop_of(scope)
    loop.target = ast.Tuple([ast.Name("turn_number", ast.Store()), loop.target], ast.Store())
    loop.iter = ast.Call(ast.Name("enumerate", ast.Load()), [loop.iter], [])


def around_in_try(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The block inside of `try` and `finally`, as a loop that shows what it does has it."""
    loop, block, _ = loop_of(scope)
    wrapped = ast.Try([block], [], [], ast.parse("turns_seen = step_of_block = None").body)
    loop.body[loop.body.index(block)] = wrapped


def more_contexts(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """`with step, ...` another context."""
    block = loop_of(scope).block
    _in_module(tree, "import contextlib")
    other = draw.choice(
        ("contextlib.nullcontext()", "contextlib.ExitStack()", "contextlib.suppress(ZeroDivisionError)")
    )
    block.items.append(ast.withitem(ast.parse(other, mode="eval").body))


def values_shown(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """More values that are only shown: added up in the block or after it, and printed between steps."""
    loop, block, step = loop_of(scope)
    names = sorted(name for name in ("loss", "output", "out", "total") if name in stored(block.body))
    value = f"float(torch.as_tensor({names[0]}).detach().float().sum())" if names else f"float({step}.number)"
    imports_torch = any(isinstance(one, ast.Import) and one.names[0].name == "torch" for one in tree.body)
    if names and not imports_torch:
        raise NotForThis
    begin, add, show = draw.choice(
        (
            ("shown_values = []", f"shown_values.append({value})", "str(sum(shown_values) / len(shown_values))"),
            (
                "shown_sum, shown_count = 0.0, 0",
                f"shown_sum += {value}; shown_count += 1",
                "str(shown_sum / shown_count)",
            ),
            (
                "shown = {'sum': 0.0, 'count': 0}",
                f"shown['sum'] += {value}; shown['count'] += 1",
                "str(shown['sum'] / shown['count'])",
            ),
            ("shown_last = None", f"shown_last = {value}", "f'{shown_last:.3f}'"),
            (
                "import collections; shown_recent = collections.deque(maxlen=3)",
                f"shown_recent.append({value})",
                "str(shown_recent[-1])",
            ),
        )
    )
    inside = draw.random() < 0.5
    scope_body = scope.body
    at = next(i for i, one in enumerate(scope_body) if any(inner is loop for inner in ast.walk(one)))
    scope_body[at:at] = ast.parse(begin).body
    if inside:
        block.body += ast.parse(add).body
        loop.body[loop.body.index(block) + 1 : loop.body.index(block) + 1] = ast.parse(show).body
    else:
        loop.body[loop.body.index(block) + 1 : loop.body.index(block) + 1] = ast.parse(f"{add}\n{show}").body


PLACES: tuple[Shape, ...] = (
    in_object,
    in_slots,
    in_class,
    in_namespace,
    in_nested_object,
    in_dictionary,
    in_list,
    in_globals,
    in_closure,
)
WAYS: tuple[Shape, ...] = (
    block_in_function,
    turn_in_function,
    body_in_function,
    steps_through_generator,
    steps_counted,
    around_in_try,
    more_contexts,
    values_shown,
)
