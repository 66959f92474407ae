"""One script in another shape, chosen at random."""

import ast
import random
from pathlib import Path

from tests.idioms.reshaped.classes import CLASSES
from tests.idioms.reshaped.drivers import DRIVERS
from tests.idioms.reshaped.functions import RESULTS
from tests.idioms.reshaped.holders import HOLDERS
from tests.idioms.reshaped.loops import NotForThis, Shape, loop_of
from tests.idioms.reshaped.places import PLACES
from tests.idioms.reshaped.scopes import Scope
from tests.idioms.reshaped.ways import WAYS

SHAPES: tuple[Shape, ...] = (*PLACES, *HOLDERS, *WAYS, *DRIVERS, *RESULTS, *CLASSES)


def reshaped(path: Path, draw: random.Random) -> tuple[str, list[str]]:
    """Return a script's text in another shape, and the names of what was done to it; none: it can have no other."""
    wanted: list[Shape] = [draw.choice((*PLACES, *HOLDERS))] if draw.random() < 0.7 else []
    wanted += draw.sample((*WAYS, *DRIVERS), draw.choice((0, 1, 1, 2)))
    wanted += draw.sample(RESULTS, draw.choice((0, 0, 1)))
    draw.shuffle(wanted)
    wanted += draw.sample(CLASSES, draw.choice((0, 0, 1)))
    text, done = path.read_text(), []
    for shape in wanted:
        if made := with_shape(text, shape, draw):
            text = made
            done.append(shape.__name__)
    return text, done


def with_shape(text: str, shape: Shape, draw: random.Random) -> str:
    """Return the text of a script with this shape; empty: it cannot have it."""
    tree = ast.parse(text)
    settings = [line for line in text.splitlines() if line.startswith("# ")]  # of the library: the number of ranks
    scope = _scope_of_loop(tree)
    if scope is None:
        return ""
    try:
        shape(tree, scope, draw)
        made = ast.unparse(ast.fix_missing_locations(tree))
        compile(made, "script", "exec")
    except (NotForThis, SyntaxError):  # a name that is both a parameter and global, for example
        return ""
    return "\n".join([*settings, made]) + "\n"


def _scope_of_loop(tree: ast.Module) -> Scope | None:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    scopes: list[Scope] = [tree, *functions]
    for scope in scopes:
        try:
            loop_of(scope)
        except NotForThis:
            continue
        return scope
    return None
