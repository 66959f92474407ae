"""Scripts whose loop is a method of a class, or stands in a function. See `places`."""

import ast
import random

from tests.idioms.reshaped.loops import EPOCH, NotForThis, Shape, begin_with, leaves_loop, loop_of, statement_with
from tests.idioms.reshaped.scopes import Rename, Scope, bound_otherwise, parts, stored

_STAYS = (ast.Import, ast.ImportFrom)


def in_main(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """All of the module in a function."""
    if scope is not tree:
        raise NotForThis
    _main_of(tree)


def in_trainer(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Methods of a class, which has all variables, and arguments of the function that had the loop, as attributes."""
    function = _main_of(tree) if scope is tree else scope
    assert isinstance(function, ast.FunctionDef)
    if function not in tree.body:
        raise NotForThis
    arguments = [one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)]
    taken = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} | {
        node.arg for node in ast.walk(function) if isinstance(node, ast.arg)
    }
    if taken & {"locals", "vars", "globals", "eval", "exec", "trainer"} or any(
        isinstance(node, ast.Return) for node in parts(function.body)
    ):
        raise NotForThis
    this = "trainer" if "self" in taken else "self"
    body = _defined_on(function.body, this)
    function.body = body
    loop, block, step = loop_of(function)
    kept = [one for one in body if _is_keeping(one, this)]
    defined = {node.id for one in kept for node in ast.walk(one) if isinstance(node, ast.Name)} - {this}
    names = (stored(body) - bound_otherwise(body) | defined | {*arguments}) - {step, EPOCH}
    _keep_out_of_functions(body, bound_otherwise(body) - names | {step}, statement_with(function, loop))
    base, prefix = draw.choice((("", ""), ("", "_"), ("(torch.nn.Module)", "the_")))
    rename = Rename(names, lambda name, context: ast.Attribute(ast.Name(this, ast.Load()), prefix + name, context))
    for node in parts(body):
        if isinstance(node, ast.AnnAssign):
            node.simple = 0
    for one in kept:
        assert isinstance(one, ast.Assign)
        assert isinstance(one.targets[0], ast.Attribute)
        one.targets[0].attr = prefix + one.targets[0].attr
    body = [one if one in kept else rename.visit(one) for one in body]
    at = next(i for i, one in enumerate(body) if any(node is loop for node in ast.walk(one)))
    methods = _methods(loop, block, step, this, draw)
    trainer = ast.parse(f"class Session{base}:\n    def __init__({', '.join([this, *arguments])}):\n        pass").body[
        0
    ]
    assert isinstance(trainer, ast.ClassDef)
    begin = trainer.body[0]
    assert isinstance(begin, ast.FunctionDef)
    begin.body = ast.parse(
        "\n".join(["super().__init__()", *(f"{this}.{prefix}{name} = {name}" for name in arguments)])
    ).body
    begin.body += body[:at]
    fit = ast.parse(f"def fit({this}):\n    pass").body[0]
    assert isinstance(fit, ast.FunctionDef)
    fit.body = body[at:]
    trainer.body += [fit, *methods]
    function.body = ast.parse(f"session = Session({', '.join(arguments)})\nsession.fit()").body
    if base:
        begin_with(tree, "import torch")
    tree.body.insert(statement_with(tree, function), trainer)


def _is_keeping(node: ast.stmt, this: str) -> bool:
    """Return whether a statement is one of those that `_defined_on` has added."""
    match node:
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name))], value=ast.Name()):
            return name == this
    return False


def _defined_on(body: list[ast.stmt], this: str) -> list[ast.stmt]:
    """Return the statements with more that keep functions, classes and modules of the scope in attributes."""
    found = []
    for statement in body:
        found.append(statement)
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names = {statement.name}
        else:
            names = bound_otherwise([statement]) if isinstance(statement, _STAYS) else set()
        for name in sorted(names):
            found += ast.parse(f"{this}.{name} = {name}").body
    return found


def _keep_out_of_functions(body: list[ast.stmt], local: set[str], at: int) -> None:
    """Refuse names that are no attributes, and that both methods would need."""
    one = {node.id for statement in body[:at] for node in ast.walk(statement) if isinstance(node, ast.Name)}
    other = {node.id for statement in body[at:] for node in ast.walk(statement) if isinstance(node, ast.Name)}
    if local & one & other or (local & other and any(isinstance(node, ast.NamedExpr) for node in parts(body))):
        raise NotForThis


def _methods(loop: ast.For, block: ast.With, step: str, this: str, draw: random.Random) -> list[ast.stmt]:
    """Put the block, or its statements, or both, into methods; return these."""
    if leaves_loop(block.body) or any(isinstance(node, (ast.Yield, ast.Return)) for node in parts([block])):
        return []
    made: list[ast.stmt] = []
    if draw.random() < 0.6 and not bound_otherwise(block.body):
        made.append(_method("training_step", step, this, block.body))
        block.body = ast.parse(f"{this}.training_step({step})").body
    if draw.random() < 0.4:
        at = loop.body.index(block)
        made.append(_method("attempt", step, this, [block]))
        loop.body[at] = ast.parse(f"{this}.attempt({step})").body[0]
    return made


def _method(name: str, step: str, this: str, body: list[ast.stmt]) -> ast.FunctionDef:
    made = ast.parse(f"def {name}({this}, {step}):\n    pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.body = body
    return made


def _main_of(tree: ast.Module) -> ast.FunctionDef:
    """Put all of a module but its imports into a function, and return that."""
    main = ast.parse("def main_of_all():\n    pass").body[0]
    assert isinstance(main, ast.FunctionDef)
    first = [one for one in tree.body if isinstance(one, _STAYS)]
    main.body = [one for one in tree.body if one not in first]
    own = stored(main.body) | bound_otherwise(main.body)
    for node in ast.walk(main):
        if isinstance(node, ast.FunctionDef) and node is not main:
            node.body = [_not_global(one, own) for one in node.body]
    declared = sorted({name for node in ast.walk(main) if isinstance(node, ast.Nonlocal) for name in node.names})
    if declared:
        main.body[:0] = ast.parse(f"if False:\n    {' = '.join(declared)} = None").body
    tree.body[:] = [*first, main, *ast.parse("main_of_all()").body]
    return main


def _not_global(statement: ast.stmt, own: set[str]) -> ast.stmt:
    return (
        ast.Nonlocal(statement.names) if isinstance(statement, ast.Global) and {*statement.names} <= own else statement
    )


CLASSES: tuple[Shape, ...] = (in_main, in_trainer)
