"""Other ways in which a script's loop reaches its block, and other statements in the block. See `places`."""

import ast
import random

from tests.idioms.reshaped.loops import (
    EPOCH,
    NotForThis,
    Shape,
    before,
    begin_with,
    instead,
    is_called,
    is_function,
    leaves_loop,
    loop_of,
    statement_with,
)
from tests.idioms.reshaped.scopes import Scope, bound_otherwise, parts, stored


def _into_function(scope: Scope, body: list[ast.stmt], name: str, *given: str) -> tuple[ast.FunctionDef, ast.stmt]:
    """Return a function with these statements of a scope, for the same variables, and a call of it."""
    if any(isinstance(node, (ast.Yield, ast.YieldFrom, ast.Return)) for node in parts(body)):
        raise NotForThis
    names = sorted((stored(body) | bound_otherwise(body)) - {*given})
    function = ast.parse(f"def {name}({', '.join(given)}):\n    pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = list(body)
    if names:
        function.body.insert(0, ast.Nonlocal(names) if is_function(scope) else ast.Global(names))
        if is_function(scope):
            scope.body[:0] = ast.parse(f"if False:\n    {' = '.join(names)} = None").body
    return function, ast.parse(f"{name}({', '.join(given)})").body[0]


def block_in_function(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The block in a function of its own, which the loop calls."""
    loop, block, step = loop_of(scope)
    if leaves_loop(block.body):
        raise NotForThis
    function, call = _into_function(scope, [block], "attempt", step)
    loop.body[loop.body.index(block)] = call
    before(scope, loop, function)


def turn_in_function(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """All of the loop's body in a function."""
    loop, _, step = loop_of(scope)
    if leaves_loop(loop.body):
        raise NotForThis
    function, call = _into_function(scope, loop.body, "turn", step)
    loop.body = [call]
    before(scope, loop, function)


def body_in_function(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The statements of the block in a function, which does not see the step."""
    loop, block, _ = loop_of(scope)
    if leaves_loop(block.body):
        raise NotForThis
    function, call = _into_function(scope, block.body, "compute")
    block.body = [call]
    before(scope, loop, function)


def steps_through_generator(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Steps from a generator of the script's own."""
    loop, _, _ = loop_of(scope)
    begin_with(
        tree,
        draw.choice(
            (
                "def each(steps):\n    yield from steps",
                "def each(steps):\n    for step in steps:\n        yield step",
                "class each:\n    def __init__(self, steps):\n        self.steps, self.seen = steps, 0\n"
                "    def __iter__(self):\n        for step in self.steps:\n            yield step\n"
                "            self.seen += 1",
            )
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
    begin_with(tree, "import contextlib")
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
    at = statement_with(scope, loop)
    scope.body[at:at] = ast.parse(begin).body
    if inside:
        block.body += ast.parse(add).body
        loop.body[loop.body.index(block) + 1 : loop.body.index(block) + 1] = ast.parse(show).body
    else:
        loop.body[loop.body.index(block) + 1 : loop.body.index(block) + 1] = ast.parse(f"{add}\n{show}").body


_CONTEXTS = """
class Watch:
    def __init__(self):
        self.entered = 0
        self.last = None
    def __enter__(self):
        self.entered += 1
        return self
    def __exit__(self, kind, error, trace):
        self.last = kind

@contextlib.contextmanager
def section(name):
    names_seen.append(name)
    try:
        yield len(names_seen)
    finally:
        names_seen.pop()

names_seen = []
watch = Watch()
"""


def own_contexts(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """A context manager of the script's own, around the block, beside the step, or in the block."""
    loop, block, _ = loop_of(scope)
    begin_with(tree, f"import contextlib{_CONTEXTS}")
    context = ast.withitem(ast.parse(draw.choice(("watch", "Watch()", "section('turn')")), mode="eval").body)
    match draw.choice(("around", "before", "beside", "inside")):
        case "around":
            loop.body[loop.body.index(block)] = ast.With([context], [block])
        case "before":  # entered first, and left last
            loop.body[loop.body.index(block)] = ast.With([context, *block.items], block.body)
        case "beside":
            block.items.append(context)
        case _:
            block.body = [ast.With([context], block.body)]


def step_on_stack(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The step entered by `ExitStack.enter_context`."""
    loop, block, step = loop_of(scope)
    if len(block.items) > 1:
        raise NotForThis
    begin_with(tree, "import contextlib")
    entered = ast.parse(f"stack.enter_context({step})").body[0]
    target = block.items[0].optional_vars
    if target is not None:
        assert isinstance(entered, ast.Expr)
        entered = ast.Assign([target], entered.value)
    stack = ast.parse("with contextlib.ExitStack() as stack:\n    pass").body[0]
    assert isinstance(stack, ast.With)
    stack.body = [entered, *block.body]
    loop.body[loop.body.index(block)] = stack


def step_named_again(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """`current = step`, and the block is that of the other name."""
    loop, block, step = loop_of(scope)
    loop.body.insert(loop.body.index(block), *ast.parse(f"current_step = {step}").body)
    block.items[0].context_expr = ast.Name("current_step", ast.Load())


def body_in_try(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The statements of the block in a `try` that gives its exceptions on."""
    block = loop_of(scope).block
    handler = draw.choice(
        (
            "except RuntimeError as error:\n    if 'out of memory' not in str(error):\n        raise",
            "except Exception as error:\n    print('failed', type(error))\n    raise",
            "except BaseException:\n    raise",
            "finally:\n    body_done = True",
            "except ZeroDivisionError:\n    pass\nelse:\n    body_done = True",
        )
    )
    made = ast.parse(f"try:\n    pass\n{handler}").body[0]
    assert isinstance(made, ast.Try)
    made.body = block.body
    block.body = [made]


def walrus(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """`(loss := ...).backward()`, and other assignments as expressions."""
    block = loop_of(scope).block
    found = 0
    for at, statement in enumerate(block.body):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if draw.random() < 0.8:
                named = ast.NamedExpr(ast.Name(name, ast.Store()), value)
                found += 1
                match block.body[at + 1 : at + 2]:
                    case [ast.Expr(ast.Call(ast.Attribute(ast.Name(id=used)) as method))] if used == name:
                        method.value = named
                        block.body[at] = ast.Pass()
                    case _:
                        block.body[at] = ast.Expr(named)
    if not found:
        raise NotForThis


def steps_in_while(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Steps taken one by one in `while`."""
    loop, _, step = loop_of(scope)
    if loop.orelse:
        raise NotForThis
    head = "while (step := next(steps_left, None)) is not None:\n    pass".replace("step :", f"{step} :")
    made = ast.parse(head).body[0]
    assert isinstance(made, ast.While)
    made.body = loop.body
    begin = ast.parse("steps_left = iter(0)").body[0]
    assert isinstance(begin, ast.Assign)
    assert isinstance(begin.value, ast.Call)
    begin.value.args = [loop.iter]
    instead(scope, loop, [begin, made])


def steps_kept(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Something keeps the iterator of steps."""
    loop, _, _ = loop_of(scope)
    keep = ast.Assign([ast.Name("all_steps", ast.Store())], loop.iter)
    loop.iter = ast.Name("all_steps", ast.Load())
    instead(scope, loop, [keep, loop])


def in_epochs(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """A loop of epochs, of so many steps each that they come to the same."""
    loop, _, _ = loop_of(scope)
    text = ast.unparse(tree)
    match loop.iter:
        case ast.Call(func=ast.Attribute(value=training, attr="steps"), args=[], keywords=[ast.keyword(value=until)]):
            pass
        case _:
            raise NotForThis
    count = until.value if isinstance(until, ast.Constant) else None
    makes_training = any(isinstance(node, ast.Call) for node in ast.walk(training))
    if not isinstance(count, int) or makes_training or leaves_loop(loop.body) or loop.orelse:
        raise NotForThis
    if ".epoch" in text or "short_groups" in text:
        raise NotForThis
    length = draw.choice([n for n in range(2, count) if count % n == 0] or [count])
    arguments = f"{count // length}, steps_per_epoch={length}"
    outer = ast.parse(f"for {EPOCH} in {ast.unparse(training)}.epochs({arguments}):\n    pass").body[0]
    assert isinstance(outer, ast.For)
    instead(scope, loop, [outer])
    loop.iter = ast.parse(f"{ast.unparse(training)}.steps()", mode="eval").body
    outer.body = [loop]


def in_coroutine(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The loop's function is a coroutine, run to its end where it was called."""
    if not isinstance(scope, ast.FunctionDef) or scope not in tree.body or scope.decorator_list:
        raise NotForThis
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == scope.name]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_called(node, {scope.name})]
    inside = {id(node) for node in ast.walk(scope)}
    if len(calls) != len(named) or any(id(call) in inside for call in calls):
        raise NotForThis  # it is passed on, or calls itself
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in parts(scope.body)):
        raise NotForThis
    for call in calls:
        made = ast.Call(call.func, call.args, call.keywords)
        call.func, call.args, call.keywords = ast.parse("asyncio.run", mode="eval").body, [made], []
    tree.body[tree.body.index(scope)] = ast.AsyncFunctionDef(**dict(ast.iter_fields(scope)))
    begin_with(tree, "import asyncio")


def in_match(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """The block in a case of `match`."""
    loop, block, step = loop_of(scope)
    made = ast.parse(f"match {step}.number % 2:\n    case 0 | 1:\n        pass").body[0]
    assert isinstance(made, ast.Match)
    made.cases[0].body = [block]
    loop.body[loop.body.index(block)] = made


WAYS: tuple[Shape, ...] = (
    block_in_function,
    turn_in_function,
    body_in_function,
    steps_through_generator,
    steps_counted,
    steps_in_while,
    steps_kept,
    step_on_stack,
    step_named_again,
    in_epochs,
    in_coroutine,
    in_match,
    around_in_try,
    body_in_try,
    more_contexts,
    own_contexts,
    values_shown,
    walrus,
)
