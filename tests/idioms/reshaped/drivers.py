"""Other statements that take the steps, and programs around the loop. See `places`."""

import ast
import random

from tests.idioms.reshaped.loops import NotForThis, Shape, begin_with, instead, leaves_loop, loop_of
from tests.idioms.reshaped.scopes import Scope, bound_otherwise, parts, stored


def steps_in_endless_while(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Steps taken one by one in `while True`, until StopIteration."""
    loop, _, step = loop_of(scope)
    if loop.orelse:
        raise NotForThis
    made = ast.parse(
        f"while True:\n    try:\n        {step} = next(steps_left)\n    except StopIteration:\n        break"
    ).body[0]
    assert isinstance(made, ast.While)
    made.body += loop.body
    begin = ast.parse("steps_left = iter(0)").body[0]
    assert isinstance(begin, ast.Assign)
    assert isinstance(begin.value, ast.Call)
    begin.value.args = [loop.iter]
    instead(scope, loop, [begin, made])


def steps_through_itertools(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Steps that functions of itertools, or of Python, give on."""
    loop, _, _ = loop_of(scope)
    source = draw.choice(
        (
            "itertools.chain(0)",
            "itertools.chain.from_iterable([0])",
            "itertools.takewhile(lambda _: True, 0)",
            "itertools.chain(0, [])",
            "map(lambda one: one, 0)",
            "filter(None, 0)",
            "filter(lambda one: one.number >= 0, 0)",
            "iter(0)",
            "(one for one in 0)",
        )
    )
    made = ast.parse(source, mode="eval").body
    for node in ast.walk(made):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                value[:] = [loop.iter if _is_zero(one) else one for one in value]
            elif _is_zero(value):
                setattr(node, field, loop.iter)
    loop.iter = made
    begin_with(tree, "import itertools")


def _is_zero(node: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0 and node.value is not False


def steps_counted_beside(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Steps with numbers beside them, which only show how far the loop has come."""
    loop, _, _ = loop_of(scope)
    source = draw.choice(("enumerate(0, 1)", "zip(0, itertools.count(1))", "zip(0, itertools.repeat(None))"))
    pair = [ast.Name("turn_number", ast.Store()), loop.target]
    loop.target = ast.Tuple(pair if source.startswith("enumerate") else pair[::-1], ast.Store())
    made = ast.parse(source, mode="eval").body
    assert isinstance(made, ast.Call)
    made.args[0] = loop.iter
    loop.iter = made
    begin_with(tree, "import itertools")


def around_in_more_tries(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The block in `try` in `try`, each with an end of its own."""
    loop, block, _ = loop_of(scope)
    inner = ast.parse(
        draw.choice(
            (
                "try:\n    pass\nexcept KeyboardInterrupt:\n    raise\nfinally:\n    tries_done = 1",
                "try:\n    pass\nexcept ValueError as error:\n    raise RuntimeError('bad') from error",
                "try:\n    pass\nfinally:\n    try:\n        tries_done = 1\n    finally:\n        tries_ended = 1",
            )
        )
    ).body[0]
    outer = ast.parse(
        "try:\n    pass\nexcept KeyboardInterrupt:\n    raise SystemExit(1)\nelse:\n    turns_good = 1"
    ).body[0]
    assert isinstance(inner, ast.Try)
    assert isinstance(outer, ast.Try)
    inner.body, outer.body = [block], [inner]
    loop.body[loop.body.index(block)] = outer


def body_in_parts(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The statements of the block in several functions, which a list, or a dictionary of events, has."""
    loop, block, _ = loop_of(scope)
    if len(block.body) < 2 or leaves_loop(block.body) or not isinstance(scope, (ast.FunctionDef, ast.Module)):
        raise NotForThis
    if any(isinstance(node, (ast.Yield, ast.YieldFrom, ast.Return)) for node in parts(block.body)):
        raise NotForThis
    names = sorted(stored(block.body) | bound_otherwise(block.body))
    is_inner = isinstance(scope, ast.FunctionDef)
    cuts = sorted(draw.sample(range(1, len(block.body)), min(len(block.body) - 1, draw.choice((1, 2, 3)))))
    pieces = [block.body[first:last] for first, last in zip([0, *cuts], [*cuts, None], strict=True)]
    functions: list[ast.stmt] = []
    for number, piece in enumerate(pieces):
        function = ast.parse(f"def part_{number}():\n    pass").body[0]
        assert isinstance(function, ast.FunctionDef)
        own = sorted({*names} & (stored(piece) | bound_otherwise(piece)))
        function.body = [*([ast.Nonlocal(own) if is_inner else ast.Global(own)] if own else []), *piece]
        functions.append(function)
    every = [f"part_{number}" for number in range(len(pieces))]
    begin, call = draw.choice(
        (
            (f"parts_of_turn = [{', '.join(every)}]", "for part_of_turn in parts_of_turn:\n    part_of_turn()"),
            (
                "events = collections.defaultdict(list)\n"
                + "\n".join(f"events['on_{name}'].append({name})" for name in every),
                "for event in list(events):\n    [each() for each in events[event]]",
            ),
            (f"parts_of_turn = ({', '.join(every)},)", "list(map(lambda each: each(), parts_of_turn))"),
        )
    )
    begin_with(tree, "import collections")
    block.body = ast.parse(call).body
    at = next(i for i, one in enumerate(scope.body) if any(node is loop for node in ast.walk(one)))
    scope.body[at:at] = [*functions, *ast.parse(begin).body]
    if names and is_inner:
        scope.body[:0] = ast.parse(f"if False:\n    {' = '.join(names)} = None").body


def turn_in_coroutine(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """All of the loop's body in a coroutine, which is run to its end in each turn."""
    loop, _, step = loop_of(scope)
    if leaves_loop(loop.body) or any(isinstance(one, (ast.Yield, ast.Return)) for one in parts(loop.body)):
        raise NotForThis
    names = sorted((stored(loop.body) | bound_otherwise(loop.body)) - {step})
    made = ast.parse(f"async def turn_alone({step}):\n    pass").body[0]
    assert isinstance(made, ast.AsyncFunctionDef)
    is_inner = isinstance(scope, ast.FunctionDef)
    made.body = [*([ast.Nonlocal(names) if is_inner else ast.Global(names)] if names else []), *loop.body]
    loop.body = ast.parse(f"asyncio.run(turn_alone({step}))").body
    at = next(i for i, one in enumerate(scope.body) if any(node is loop for node in ast.walk(one)))
    scope.body.insert(at, made)
    begin_with(tree, "import asyncio")
    if names and is_inner:
        scope.body[:0] = ast.parse(f"if False:\n    {' = '.join(names)} = None").body


def program_in_try(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The program's last statement in `try`, as one that is stopped by hand has it."""
    handler = draw.choice(
        (
            "except KeyboardInterrupt:\n    print('stopped')\nfinally:\n    program_done = True",
            "except Exception:\n    import traceback\n    traceback.print_exc()\n    raise",
            "except SystemExit:\n    raise\nexcept BaseException as error:\n    print(type(error))\n    raise",
        )
    )
    made = ast.parse(f"try:\n    pass\n{handler}").body[0]
    assert isinstance(made, ast.Try)
    last = tree.body[-1]
    if isinstance(last, ast.If):
        made.body, last.body = last.body, [made]
    elif isinstance(last, ast.Expr):
        made.body, tree.body[-1] = [last], made
    else:
        raise NotForThis


def loop_with_else(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """`for ... else`, as a loop that is to say whether it was left early has it."""
    loop, _, _ = loop_of(scope)
    if loop.orelse:
        raise NotForThis
    loop.orelse = ast.parse("left_early = False").body


def temporaries_deleted(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Variables that only the block uses deleted at its end, or after it."""
    loop, block, step = loop_of(scope)
    inside = {id(node) for one in block.body for node in ast.walk(one)}
    elsewhere = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in inside} | {
        name for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names
    }
    certain = [
        target.id
        for one in block.body
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name) and _is_set_first(block.body, target.id)
    ]
    names = sorted({*certain} - elsewhere - {step})
    if not names or leaves_loop(block.body):
        raise NotForThis
    deleted = ast.parse(f"del {', '.join(names)}").body
    if draw.random() < 0.5:
        block.body += deleted
    else:
        at = loop.body.index(block) + 1
        loop.body[at:at] = deleted


def _is_set_first(body: list[ast.stmt], name: str) -> bool:
    """Return whether the first statement that has a name sets it without a condition, and no `del` has it."""
    using = [one for one in body if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(one))]
    match using[0]:
        case ast.Assign(value=value):
            reads = any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value))
        case _:
            reads = True
    return not reads and not any(isinstance(node, ast.Delete) for one in using for node in ast.walk(one))


DRIVERS: tuple[Shape, ...] = (
    steps_in_endless_while,
    steps_through_itertools,
    steps_counted_beside,
    around_in_more_tries,
    body_in_parts,
    turn_in_coroutine,
    program_in_try,
    loop_with_else,
    temporaries_deleted,
)
