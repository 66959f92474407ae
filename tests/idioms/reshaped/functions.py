"""Functions and classes that take variables and give them back, instead of sharing them with the loop. See `places`."""

import ast
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.idioms.reshaped.loops import NotForThis, Shape, begin_with, is_function, leaves_loop, loop_of
from tests.idioms.reshaped.loops import statement_with as place_of
from tests.idioms.reshaped.scopes import Scope, bound_otherwise, parts, stored


class Exchange(NamedTuple):
    """Names that statements take, those of them that stay the same from the loop's beginning on, and what they give."""

    given: list[str]
    constant: set[str]
    results: list[str]
    is_closed: bool  # they need no other variable of the function around


def body_with_results(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The statements of the block in a function that returns what it has set."""
    loop, block, _ = loop_of(scope)
    known = _assured(loop.body[: loop.body.index(block)]) | _names_in([item.optional_vars for item in block.items])
    block.body = _called(tree, scope, block.body, known, draw)


def block_with_results(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The block in a function that returns what it has set."""
    loop, block, _ = loop_of(scope)
    at = loop.body.index(block)
    loop.body[at : at + 1] = _called(tree, scope, [block], _assured(loop.body[:at]), draw)


def turn_with_results(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """All of the loop's body in a function that returns what it has set."""
    loop, _, _ = loop_of(scope)
    loop.body = _called(tree, scope, loop.body, set(), draw)


def loop_with_results(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The loop in a function that returns what it has set."""
    loop, _, _ = loop_of(scope)
    if loop not in scope.body:
        raise NotForThis
    at = scope.body.index(loop)
    made = _called(tree, scope, [loop], set(), draw)
    at = scope.body.index(loop)
    scope.body[at : at + 1] = made


def loop_in_generator(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The loop in a generator, which yields after each block; the code after the block iterates over it."""
    loop, block, step = loop_of(scope)
    at = loop.body.index(block)
    if loop not in scope.body or loop.orelse or leaves_loop(loop.body):
        raise NotForThis
    after = loop.body[at + 1 :]
    names = sorted((stored([loop]) | bound_otherwise([loop])) - {step})
    generator = ast.parse(f"def each_turn():\n    pass\nfor {step} in each_turn():\n    pass")
    function, consumer = generator.body
    assert isinstance(function, ast.FunctionDef)
    assert isinstance(consumer, ast.For)
    loop.body = [*loop.body[: at + 1], *ast.parse(f"yield {step}").body]
    shared = [ast.Nonlocal(names) if is_function(scope) else ast.Global(names)] if names else []
    function.body = [*shared, loop]
    consumer.body = after or [ast.Pass()]
    place = scope.body.index(loop)
    scope.body[place : place + 1] = [function, consumer]
    if names and is_function(scope):
        scope.body[:0] = ast.parse(f"if False:\n    {' = '.join(names)} = None").body


def driven(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The loop in a function that knows nothing of it but what to call for each step."""
    loop, _, step = loop_of(scope)
    if loop.orelse:
        raise NotForThis
    iterated = loop.iter
    loop.iter = ast.Name("nothing", ast.Load())
    loop.body = _called(tree, scope, loop.body, set(), draw, results=False)
    match loop.body:
        case [ast.Expr(ast.Call() as call)]:
            pass
        case _:
            raise NotForThis
    begin_with(
        tree,
        draw.choice(
            (
                "def drive(steps, each):\n    for step in steps:\n        each(step)",
                "class Engine:\n    def __init__(self, each):\n        self.each = each\n"
                "    def run(self, steps):\n        for self.step in steps:\n            self.each(self.step)\n"
                "def drive(steps, each):\n    Engine(each).run(steps)",
                "def drive(steps, each):\n    for _ in map(each, steps):\n        pass",
            )
        ),
    )
    made = ast.parse(f"drive(0, lambda {step}: 0)").body[0]
    assert isinstance(made, ast.Expr)
    assert isinstance(made.value, ast.Call)
    function = made.value.args[1]
    assert isinstance(function, ast.Lambda)
    function.body = call
    made.value.args[0] = iterated
    for node in parts(scope.body):
        for body in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if isinstance(body, list) and loop in body:
                body[body.index(loop)] = made
                return
    scope.body[scope.body.index(loop)] = made


# --- a call in the place of statements -----------------------------------------------------------------------------
def _called(
    tree: ast.Module, scope: Scope, body: list[ast.stmt], known: set[str], draw: random.Random, *, results: bool = True
) -> list[ast.stmt]:
    """Define a function with these statements, and return a call of it that sets the same variables."""
    exchange = _exchange(tree, scope, body, known)
    if exchange.results and not results:
        raise NotForThis
    end, received = _returned(tree, exchange.results, draw)
    constant = [name for name in exchange.given if name in exchange.constant and draw.random() < 0.7]
    others = [name for name in exchange.given if name not in constant]
    way = draw.choice((_as_it_is, _decorated, _partial, _factory, _method, _callable))
    at = place_of(scope, loop_of(scope).loop)
    source, call = way(constant, others, draw)
    defined = ast.parse(source).body
    function = next(one for part in defined for one in ast.walk(part) if getattr(one, "name", "") == "computed")
    assert isinstance(function, ast.FunctionDef)
    head = function.body if isinstance(function.body[0], ast.Assign) else []  # of a method, which reads its constants
    function.body = [*head, *body, *end]
    if isinstance(defined[0], ast.ClassDef) and exchange.is_closed and scope is not tree:
        tree.body.insert(place_of(tree, scope), defined.pop(0))
    scope.body[at:at] = defined
    value = ast.parse(call, mode="eval").body
    return received(value)


def _as_it_is(constant: list[str], others: list[str], draw: random.Random) -> tuple[str, str]:
    names = ", ".join([*others, *constant])
    return f"def computed({names}):\n    pass", f"computed({names})"


def _decorated(constant: list[str], others: list[str], draw: random.Random) -> tuple[str, str]:
    names = ", ".join([*others, *constant])
    decorator = draw.choice(
        (
            "import functools\ndef logged(function):\n    @functools.wraps(function)\n"
            "    def wrapper(*args, **kwargs):\n        return function(*args, **kwargs)\n    return wrapper",
            "import functools\ndef logged(function):\n    @functools.wraps(function)\n"
            "    def wrapper(*args, **kwargs):\n        wrapper.calls += 1\n        return function(*args, **kwargs)\n"
            "    wrapper.calls = 0\n    return wrapper",
            "class logged:\n    def __init__(self, function):\n        self.function, self.calls = function, 0\n"
            "    def __call__(self, *args):\n        self.calls += 1\n        return self.function(*args)",
            "import functools\ndef logged(function):\n    count = 0\n    @functools.wraps(function)\n"
            "    def wrapper(*args):\n        nonlocal count\n        count += 1\n        return function(*args)\n"
            "    return wrapper",
        )
    )
    return f"{decorator}\n@logged\ndef computed({names}):\n    pass", f"computed({names})"


def _partial(constant: list[str], others: list[str], draw: random.Random) -> tuple[str, str]:
    begin = f"import functools\ndef computed({', '.join([*constant, *others])}):\n    pass"
    by_name = [f"{name}={name}" for name in constant]
    if draw.random() < 0.5:
        return (
            f"{begin}\nbound = functools.partial({', '.join(['computed', *constant])})",
            f"bound({', '.join(others)})",
        )
    named = ", ".join(f"{name}={name}" for name in others)
    return f"{begin}\nbound = functools.partial({', '.join(['computed', *by_name])})", f"bound({named})"


def _factory(constant: list[str], others: list[str], draw: random.Random) -> tuple[str, str]:
    inner = f"    def computed({', '.join(others)}):\n        pass\n    return computed"
    return (
        f"def make_computed({', '.join(constant)}):\n{inner}\nmade = make_computed({', '.join(constant)})",
        f"made({', '.join(others)})",
    )


def _method(constant: list[str], others: list[str], draw: random.Random) -> tuple[str, str]:
    if {"self", "worker"} & {*constant, *others}:
        raise NotForThis
    keep = "; ".join(f"self.{one} = {one}" for one in constant) or "pass"
    read = f"{', '.join(constant)}, = {', '.join(f'self.{one}' for one in constant)}," if constant else "pass"
    source = (
        f"class Worker:\n    def __init__({', '.join(['self', *constant])}):\n        {keep}\n"
        f"    def computed({', '.join(['self', *others])}):\n        {read}\n"
        f"worker = Worker({', '.join(constant)})"
    )
    return source, f"worker.computed({', '.join(others)})"


def _callable(constant: list[str], others: list[str], draw: random.Random) -> tuple[str, str]:
    source, call = _method(constant, others, draw)
    return source.replace(
        "    def computed(", "    def __call__(self, *args):\n        return self.computed(*args)\n    def computed("
    ), call.replace("worker.computed(", "worker(")


def _returned(
    tree: ast.Module, names: list[str], draw: random.Random
) -> tuple[list[ast.stmt], Callable[[ast.expr], list[ast.stmt]]]:
    """Return how a function ends that gives these variables, and a function that makes statements of its call."""
    if not names:
        return [], lambda call: [ast.Expr(call)]
    kind = draw.choice(("tuple", "dict", "namedtuple", "dataclass"))
    if kind == "tuple":
        end = ast.parse(f"return {', '.join(names)}").body
        target = ast.parse(f"{', '.join(names)} = 0").body[0]
        assert isinstance(target, ast.Assign)
        return end, lambda call: [ast.Assign(target.targets, call)]
    if kind == "dict":
        ends = ast.parse("return {" + ", ".join(f"{name!r}: {name}" for name in names) + "}").body
        reads = [f"{name} = returned[{name!r}]" for name in names]
    else:
        ends = ast.parse(f"return Returned({', '.join(names)})").body
        reads = [f"{name} = returned.{name}" for name in names]
        fields = "".join(f"\n    {name}: object" for name in names)
        begin_with(
            tree,
            f"import collections\nReturned = collections.namedtuple('Returned', {names!r})"
            if kind == "namedtuple"
            else f"import dataclasses\n@dataclasses.dataclass\nclass Returned:{fields}",
        )
    reading = ast.parse("\n".join(reads)).body
    return ends, lambda call: [ast.Assign([ast.Name("returned", ast.Store())], call), *reading]


# --- what statements take and give ----------------------------------------------------------------------------------
def _exchange(tree: ast.Module, scope: Scope, body: list[ast.stmt], known: set[str]) -> Exchange:
    if leaves_loop(body) or any(isinstance(node, (ast.Yield, ast.YieldFrom, ast.Return)) for node in parts(body)):
        raise NotForThis
    if any(isinstance(getattr(node, "ctx", None), ast.Del) and isinstance(node, ast.Name) for node in parts(body)):
        raise NotForThis
    found = loop_of(scope)
    at = place_of(scope, found.loop)
    sets, used = stored(body), _names_in(body)
    inside = {id(node) for statement in body for node in ast.walk(statement)}
    outside = {node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and id(node) not in inside}
    elsewhere = _names_in_functions(tree, scope, inside)
    shared = {
        name for one in ast.walk(tree) if isinstance(one, (ast.Global, ast.Nonlocal)) for name in one.names
    } - _shared_inside(body)
    local = bound_otherwise(body) - sets
    if sets & (elsewhere | shared) or local & outside or _reaches_global(body):
        raise NotForThis
    arguments = _parameters(scope)
    start = arguments | _assured(scope.body[:at])
    bound = start | known | ({found.step} if found.loop not in body else set())
    given = sorted(used & bound)
    own = arguments | stored(scope.body) | bound_otherwise(scope.body)
    if sets & (own - bound) & _read_first(body):
        raise NotForThis  # it may have a value from the turn before
    results = sorted(sets & outside)
    if not {*results} <= (_assured(body) | {*given}):
        raise NotForThis
    changing = stored(scope.body[at:]) | bound_otherwise(scope.body[at:])
    return Exchange(given, (start - changing - shared), results, not (used & own) - {*given} - sets)


def _read_first(body: list[ast.stmt]) -> set[str]:
    """Return names that these statements may read before they set them."""
    certain: set[str] = set()
    found: set[str] = set()
    for statement in body:
        loads = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        match statement:
            case ast.With(items=items, body=inner):
                found |= _read_first(inner) - certain - _names_in([item.optional_vars for item in items])
                found |= _names_in([item.context_expr for item in items]) - certain
            case ast.For(target=target, iter=iterated, body=inner, orelse=[]):
                found |= (_names_in([iterated]) | (_read_first(inner) - _bound_by([target]))) - certain
            case ast.If(test=test, body=inner, orelse=other):
                found |= (_names_in([test]) | _read_first(inner) | _read_first(other)) - certain
            case ast.Assign() | ast.Expr() | ast.AnnAssign() | ast.Import() | ast.ImportFrom():
                found |= loads - certain
            case _:
                found |= (loads | stored([statement])) - certain
        certain |= _assured([statement])
    return found


def _assured(body: list[ast.stmt]) -> set[str]:
    """Return names that have a value after these statements, whatever happens in them."""
    names: set[str] = set()
    for statement in body:
        match statement:
            case ast.Assign(targets=targets):
                names |= _bound_by(targets)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                names |= _bound_by([target])
            case ast.With(items=items, body=inner):
                names |= _bound_by([item.optional_vars for item in items if item.optional_vars]) | _assured(inner)
            case ast.If(body=inner, orelse=other):
                names |= _assured(inner) & _assured(other)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Expr(value=ast.NamedExpr(target=target)):
                names |= _bound_by([target])
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.NamedExpr(target=target)))):
                names |= _bound_by([target])
            case ast.Import() | ast.ImportFrom():
                names |= bound_otherwise([statement])
    return names


def _bound_by(targets: list[ast.expr]) -> set[str]:
    return {
        node.id
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _names_in(nodes: Sequence[ast.AST | None]) -> set[str]:
    return {node.id for one in nodes if one is not None for node in ast.walk(one) if isinstance(node, ast.Name)}


def _parameters(scope: Scope) -> set[str]:
    if not isinstance(scope, ast.FunctionDef):
        return set()
    return {one.arg for one in ast.walk(scope.args) if isinstance(one, ast.arg)}


def _names_in_functions(tree: ast.Module, scope: Scope, inside: set[int]) -> set[str]:
    """Return names that functions mean, or could mean, other than those in the statements."""
    around = tree if not is_function(scope) else scope
    functions = (
        node
        for node in ast.walk(around)
        if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef))
        and node is not scope
        and id(node) not in inside
    )
    return {one.id for function in functions for one in ast.walk(function) if isinstance(one, ast.Name)}


def _shared_inside(body: list[ast.stmt]) -> set[str]:
    """Return variables of these statements that functions in them set."""
    return {
        name
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Nonlocal)
        for name in node.names
    }


def _reaches_global(body: list[ast.stmt]) -> bool:
    """Return whether these statements, or functions in them, say `global`, or look at the names around."""
    return any(
        isinstance(node, ast.Global)
        or (isinstance(node, ast.Name) and node.id in {"locals", "vars", "globals", "eval", "exec", "super"})
        for statement in body
        for node in ast.walk(statement)
    )


RESULTS: tuple[Shape, ...] = (
    body_with_results,
    block_with_results,
    turn_with_results,
    loop_with_results,
    loop_in_generator,
    driven,
)
