"""Variables of a script that can carry something from step to step, and the lines that change them. Pure.

By the text of the script alone: of the names whose values differ it leaves out those that each step sets anew before it
reads them, such as the loss.
"""

import ast
from collections.abc import Iterator

import msgspec

_MUTATING = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "pop", "popleft", "clear", "remove"}
)


class Uses(msgspec.Struct, frozen=True, kw_only=True):
    """The uses of one name in a script."""

    carried: bool  # a step may read what an earlier one left in it
    lines: tuple[int, ...]  # that change it, those in the loop or in functions first


def uses_of(source: str, names: list[str]) -> dict[str, Uses]:
    """Uses by name. Attributes (`self.x`) and variables of other files count as their first word says."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _offers_steps(node.iter)]
    events = [event for loop in loops for event in (*_stores(loop.target), *_events(loop.body))]
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    shared = {
        name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, (ast.Global, ast.Nonlocal))
        for name in node.names
    }
    inside = {id(node) for loop in loops for node in ast.walk(loop)}
    inside |= {id(node) for f in functions if not any(loop in ast.walk(f) for loop in loops) for node in ast.walk(f)}
    found = {}
    for name in names:
        word = name.split(".")[0].split(" ")[0]
        first = next((kind for kind, known in events if known == word), "")
        lines = [(id(node) not in inside, node.lineno) for node in _changing(tree, word)]
        found[name] = Uses(
            carried=first != "store" or word in shared or "." in name,
            lines=tuple(line for _, line in sorted(set(lines))),
        )
    return found


def _offers_steps(iterable: ast.expr) -> bool:
    """`training.steps(...)`, perhaps wrapped: `tqdm(training.steps(...))`."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "steps"
        for node in ast.walk(iterable)
    )


def _events(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """("load" or "store", name), roughly in the order of events; what only some steps store counts as loaded."""
    for statement in body:
        match statement:
            case ast.Assign(targets=targets, value=value):
                yield from _loads(value)
                for target in targets:
                    yield from _stores(target)
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    yield from _loads(value)
                    yield from _stores(target)
            case ast.AugAssign(target=target, value=value):
                yield from _loads(value)
                yield from ((("load", node.id)) for node in ast.walk(target) if isinstance(node, ast.Name))
            case ast.With(items=items, body=inner):
                for item in items:
                    yield from _loads(item.context_expr)
                    if item.optional_vars is not None:
                        yield from _stores(item.optional_vars)
                yield from _events(inner)
            case ast.For(target=target, iter=iterable, body=inner, orelse=other):
                yield from _loads(iterable)
                yield from _stores(target)
                yield from _events(inner)
                yield from _events(other)
            case ast.If(test=test, body=inner, orelse=other):
                yield from _loads(test)
                both = {name for kind, name in _events(inner) if kind == "store"}
                both &= {name for kind, name in _events(other) if kind == "store"}
                for kind, name in (*_events(inner), *_events(other)):
                    yield (kind if kind == "load" or name in both else "load"), name
            case ast.While(test=test, body=inner):
                yield from _loads(test)
                yield from _events(inner)
            case ast.Try(body=inner, handlers=handlers, orelse=other, finalbody=final):
                yield from _events(inner)
                for handler in handlers:
                    yield from _events(handler.body)
                yield from _events(other)
                yield from _events(final)
            case _:
                yield from _loads(statement)


def _loads(node: ast.AST) -> Iterator[tuple[str, str]]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
            yield "load", each.id
    for each in ast.walk(node):
        if isinstance(each, ast.NamedExpr) and isinstance(each.target, ast.Name):
            yield "store", each.target.id


def _stores(target: ast.AST) -> Iterator[tuple[str, str]]:
    for each in ast.walk(target):
        if isinstance(each, ast.Name):
            yield ("store" if isinstance(each.ctx, ast.Store) else "load"), each.id


def _changing(tree: ast.AST, word: str) -> Iterator[ast.stmt | ast.expr]:
    """Statements and calls that give the name another value, or change what it holds."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) if any(_is_in_target(word, target) for target in targets):
                yield node
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target) if _is_in_target(word, target):
                yield node
            case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if (
                attr in _MUTATING or (attr.endswith("_") and not attr.startswith("_"))
            ) and _root(owner) == word:
                yield node


def _is_in_target(word: str, target: ast.AST) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(_is_in_target(word, member) for member in target.elts)
    return _root(target) == word


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
