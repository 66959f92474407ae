"""Names that statements need from what ran before them: those that they read before they set them."""

import ast
from collections.abc import Iterable, Sequence

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def needed_by(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names that these statements, one after the other, may read or delete before all of them are set."""
    return _needed_before(statements, set())


def read_in(node: ast.AST) -> set[str]:
    """Return the names that this code reads or deletes, without the variables of its comprehensions."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Store) else {node.id}
    found = set[str]().union(*map(read_in, ast.iter_child_nodes(node)))
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        found.add(node.target.id)
    if isinstance(node, _COMPREHENSIONS):
        targets = (one for each in node.generators for one in ast.walk(each.target))
        found -= {one.id for one in targets if isinstance(one, ast.Name)}
        found |= read_in(node.generators[0].iter)  # the first one is read outside
    return found


def _needed_before(statements: Sequence[ast.stmt], after: set[str]) -> set[str]:
    """Return the names needed before these statements. `after`: those needed after them."""
    needed = after
    for statement in reversed(statements):
        needed = _needed(statement, needed)
    return needed


def _needed(node: ast.stmt, after: set[str]) -> set[str]:
    """Return the names needed before a statement. A name counts as set only where no way leads around it."""
    match node:
        case ast.Assign(targets=targets, value=value):
            return (after - _set_by(targets)) | read_in(value) | _read_by(targets)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            return (after - _set_by([target])) | read_in(value) | _read_by([target])
        case ast.If(test=test, body=body, orelse=orelse):
            return read_in(test) | _needed_before(body, after) | _needed_before(orelse, after)
        case ast.For() | ast.AsyncFor():
            inner = needed_by(node.body) - _set_by([node.target])
            return after | read_in(node.iter) | _read_by([node.target]) | inner | needed_by(node.orelse)
        case ast.While():
            return after | read_in(node.test) | needed_by(node.body) | needed_by(node.orelse)
        case ast.With() | ast.AsyncWith():  # one may end its block early, as `contextlib.suppress` does
            held = [item.optional_vars for item in node.items if item.optional_vars is not None]
            items = set[str]().union(*(read_in(item.context_expr) for item in node.items))
            return after | items | _read_by(held) | (needed_by(node.body) - _set_by(held))
        case _:
            return after | read_in(node)


def _set_by(targets: Iterable[ast.expr]) -> set[str]:
    """Return the names that an assignment to these targets sets."""
    found = set[str]()
    for target in targets:
        match target:
            case ast.Name(id=name):
                found.add(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                found |= _set_by(parts)
            case ast.Starred(value=value):
                found |= _set_by([value])
    return found


def _read_by(targets: Iterable[ast.expr]) -> set[str]:
    """Return the names that an assignment to these targets reads: those of the containers and objects in it."""
    return set[str]().union(*map(read_in, targets))
