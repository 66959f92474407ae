"""Other places for the variables of a script's loop.

Each shape takes the tree of a script and the function (or module) with the loop, and changes both in place. It raises
NotForThis where a script cannot have the shape. What the script computes stays the same.
"""

import ast
import random
from collections.abc import Callable

from tests.idioms.reshaped.loops import EPOCH, NotForThis, Shape, begin_with, is_called, is_function, loop_of
from tests.idioms.reshaped.scopes import Rename, Scope, bound_otherwise, parts, stored

HOLDER = "kept"


def chosen(scope: Scope, draw: random.Random) -> list[str]:
    arguments = (
        {one.arg for one in ast.walk(scope.args) if isinstance(one, ast.arg)}
        if isinstance(scope, ast.FunctionDef)
        else set()
    )
    if any(
        isinstance(node, ast.Call) and is_called(node, {"locals", "vars", "globals", "eval", "exec"})
        for node in ast.walk(scope)
    ):
        raise NotForThis
    others = {name for node in parts(scope.body) if isinstance(node, ast.Nonlocal) for name in node.names}
    names = sorted(stored(scope.body) - bound_otherwise(scope.body) - arguments - others - {loop_of(scope).step, EPOCH})
    share = draw.choice((0.4, 0.7, 1.0))
    chosen = [name for name in names if draw.random() < share]
    if not chosen:
        raise NotForThis
    return chosen


def move(scope: Scope, names: list[str], expression: Callable[[str, ast.expr_context], ast.expr]) -> None:
    for node in parts(scope.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in names:
            node.simple = 0
    rename = Rename(set(names), expression)
    scope.body = [rename.visit(statement) for statement in scope.body]


def _attribute(name: str, context: ast.expr_context) -> ast.expr:
    return ast.Attribute(ast.Name(HOLDER, ast.Load()), name, context)


def in_object(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of an object of the script's own class."""
    names = chosen(scope, draw)
    move(scope, names, _attribute)
    begin_with(scope, f"{HOLDER} = Keeper()")
    begin_with(tree, "class Keeper:\n    pass")


def in_slots(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Slots of an object."""
    names = chosen(scope, draw)
    move(scope, names, _attribute)
    begin_with(scope, f"{HOLDER} = Keeper()")
    begin_with(tree, f"class Keeper:\n    __slots__ = {tuple(names)!r}")


def in_class(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of a class."""
    move(scope, chosen(scope, draw), _attribute)
    begin_with(tree, f"class {HOLDER}:\n    pass")


def in_namespace(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of an `argparse.Namespace`, which other functions of the script could share."""
    move(scope, chosen(scope, draw), _attribute)
    begin_with(tree, f"import argparse\n{HOLDER} = argparse.Namespace()")


def in_nested_object(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of an object that another one has."""

    def inner(name: str, context: ast.expr_context) -> ast.expr:
        return ast.Attribute(_attribute("inner", ast.Load()), name, context)

    move(scope, chosen(scope, draw), inner)
    begin_with(scope, f"{HOLDER} = Keeper()\n{HOLDER}.inner = Keeper()")
    begin_with(tree, "class Keeper:\n    pass")


def in_dictionary(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Items of a dictionary."""

    def item(name: str, context: ast.expr_context) -> ast.expr:
        return ast.Subscript(ast.Name(HOLDER, ast.Load()), ast.Constant(name), context)

    move(scope, chosen(scope, draw), item)
    begin_with(scope, f"{HOLDER} = {{}}")


def in_list(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Items of a list."""
    names = chosen(scope, draw)

    def item(name: str, context: ast.expr_context) -> ast.expr:
        return ast.Subscript(ast.Name(HOLDER, ast.Load()), ast.Constant(names.index(name)), context)

    move(scope, names, item)
    begin_with(scope, f"{HOLDER} = [None] * {len(names)}")


def in_globals(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Names of the module instead of the function's own."""
    if not is_function(scope):
        raise NotForThis
    names = set(chosen(scope, draw))
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & stored(tree.body)
    renamed = {name: f"the_{name}" for name in names - taken}
    if not renamed:
        raise NotForThis
    move(scope, sorted(renamed), lambda name, context: ast.Name(renamed[name], context))
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
    if not is_function(scope) or scope not in tree.body:
        raise NotForThis
    names = sorted(set(chosen(scope, draw)))
    at = tree.body.index(scope)
    outer = ast.parse(f"def make_{scope.name}():\n    {' = '.join(names)} = None\n    return {scope.name}").body[0]
    assert isinstance(outer, ast.FunctionDef)
    scope.body.insert(0, ast.Nonlocal(names))
    outer.body.insert(1, scope)
    tree.body[at : at + 1] = [outer, *ast.parse(f"{scope.name} = make_{scope.name}()").body]


def in_dataclass(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Fields of a dataclass."""
    names = chosen(scope, draw)
    move(scope, names, _attribute)
    begin_with(scope, f"{HOLDER} = Keeper()")
    fields = "".join(f"\n    {name}: object = None" for name in names)
    slots = draw.choice(("", "(slots=True)", "(eq=False)"))
    begin_with(tree, f"import dataclasses\n@dataclasses.dataclass{slots}\nclass Keeper:{fields}")


def in_attribute_dictionary(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Items of a dictionary that are its attributes too."""
    move(scope, chosen(scope, draw), _attribute)
    begin_with(scope, f"{HOLDER} = Keeper()")
    one = "    __getattr__ = dict.__getitem__\n    __setattr__ = dict.__setitem__\n    __delattr__ = dict.__delitem__"
    other = "    def __init__(self):\n        super().__init__()\n        self.__dict__ = self"
    begin_with(tree, f"class Keeper(dict):\n{draw.choice((one, other))}")


def in_default(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Items of a dictionary that is the default of a parameter."""
    if not isinstance(scope, ast.FunctionDef):
        raise NotForThis

    def item(name: str, context: ast.expr_context) -> ast.expr:
        return ast.Subscript(ast.Name(HOLDER, ast.Load()), ast.Constant(name), context)

    move(scope, chosen(scope, draw), item)
    scope.args.kwonlyargs.append(ast.arg(HOLDER))
    scope.args.kw_defaults.append(ast.Dict([], []))


def in_properties(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of an object that are read and set through properties."""
    names = chosen(scope, draw)
    move(scope, names, _attribute)
    begin_with(scope, f"{HOLDER} = Keeper()")
    begin_with(
        tree,
        "def kept_under(name):\n    def get(self):\n        return self.__dict__[name]\n"
        "    def put(self, value):\n        self.__dict__[name] = value\n    return property(get, put)\n"
        "class Keeper:" + "".join(f"\n    {name} = kept_under('_{name}')" for name in names),
    )


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
    in_dataclass,
    in_attribute_dictionary,
    in_default,
    in_properties,
)
