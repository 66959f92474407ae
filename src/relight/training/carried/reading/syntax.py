"""Names and forms of expressions: which calls change their arguments, and which only show them."""

import ast
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from relight.training.carried.code.refs import (
    UNKNOWN,
    Key,
    Ref,
)
from relight.training.carried.reading.flow import Use

MUTATORS = frozenset(
    "append extend insert pop popleft appendleft extendleft remove clear update setdefault add discard sort reverse "
    "popitem rotate subtract push fill difference_update intersection_update symmetric_difference_update "
    "move_to_end itemset put resize put_nowait get_nowait load_state_dict spawn set".split()
)
MUTATORS_OF_FIRST = frozenset(
    "heappush heappop heapify heappushpop heapreplace shuffle insort next setattr delattr iadd setitem delitem".split()
)
SHOWING = frozenset(
    "print info debug warning error log add_scalar add_scalars add_histogram add_image set_postfix set_postfix_str "
    "set_description log_metrics log_dict write writelines writerow writerows writeheader report pprint".split()
)
VIEWS = frozenset(  # methods of tensors and arrays whose result shares their memory
    "view reshape flatten ravel squeeze unsqueeze t transpose permute narrow select detach expand diagonal unbind "
    "chunk split numpy view_as unflatten swapaxes "
    "values _values indices _indices crow_indices col_indices get_data get_mask int_repr".split()  # of odd layouts
)
SAME = frozenset({"list", "tuple", "iter", "reversed", "sorted"})  # of the same members
NO_NAME = ast.Name("", ast.Load())
MOST_MEMBERS = 8  # of a container whose members are distinguished
ASKS_FOR_FILES = frozenset(
    "exists lexists isfile isdir is_file is_dir glob iglob rglob listdir scandir iterdir".split()
)
_READS_FILES = frozenset("open load read_text read_bytes load_file loadtxt genfromtxt read_csv read_json".split())
_MISSING = frozenset({"FileNotFoundError"})  # errors that tell of a file which is not there, and of others as well
_PERHAPS_MISSING = frozenset("OSError IOError EnvironmentError Exception BaseException".split())
CHANGES_FILES = frozenset(
    "save savez savez_compressed savetxt save_file save_pretrained dump write_text write_bytes touch mkdir makedirs "
    "rename renames replace remove unlink rmtree copy copy2 copyfile copytree move symlink to_csv to_json "
    "to_parquet".split()
)
_IN_FILES = frozenset("dump flush".split())  # what fills open ones, besides what shows values
_OF_FILES = frozenset(
    {"os", "shutil", "torch", "numpy", "json", "pickle", "yaml"}
)  # modules with names that others have
_ALSO_OTHERS = frozenset("save dump replace remove copy move".split())
OF_MODULES = frozenset("parameters named_parameters buffers named_buffers state_dict modules children".split())


def spread(arguments: Sequence[ast.expr]) -> list[ast.expr]:
    """Arguments, with those of `*(a, b)` one by one."""
    found: list[ast.expr] = []
    for one in arguments:
        inner = one.value if isinstance(one, ast.Starred) else None
        found += inner.elts if isinstance(inner, (ast.Tuple, ast.List)) else [one]
    return found


def spread_keywords(keywords: Sequence[ast.keyword]) -> list[ast.keyword]:
    """Keywords, with those of `**{"a": b}` one by one."""
    found: list[ast.keyword] = []
    for one in keywords:
        if one.arg is None and isinstance(one.value, ast.Dict):
            pairs = zip(one.value.keys, one.value.values, strict=True)
            found += [ast.keyword(str(k.value) if isinstance(k, ast.Constant) else None, value) for k, value in pairs]
        else:
            found.append(one)
    return found


def is_in_place(name: str) -> bool:
    """Return whether a function changes its first argument, by its name; gradients are not carried."""
    return name[-1:] == "_" and not name.startswith("clip_grad")


def constant_of(node: ast.expr) -> Any:
    """The number or text that an index says. UNKNOWN if it is no constant."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value if isinstance(node.operand.value, int) else UNKNOWN
    return node.value if isinstance(node, ast.Constant) else UNKNOWN


def known(ref: Ref) -> Any:
    """The object that an expression names, if that can be told."""
    return ref.alias.value if ref.value is UNKNOWN and ref.alias is not None else ref.value


def is_showing(function: ast.expr) -> bool:
    """Return whether a call only shows what it is given, by its name."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in SHOWING


def changes_files(node: ast.Call, owner: Any) -> bool:
    """Return whether a call of a library's makes, changes or removes files, by its name. `owner`: of the method."""
    name = _name_of(node)
    if name == "open":
        texts = [constant_of(one) for one in (*node.args, *(keyword.value for keyword in node.keywords))]
        return any(isinstance(one, str) and {*one} <= {*"rwaxbt+"} and {*one} & {*"wax+"} for one in texts)
    return name in CHANGES_FILES and (name not in _ALSO_OTHERS or getattr(owner, "__name__", "") in _OF_FILES)


def asks_by_failing(body: Sequence[ast.stmt], caught: Sequence[ast.expr | None]) -> bool:
    """Return whether statements read files, and something else is done if there are none: these errors are `caught`."""
    names = {name for one in caught for name in _errors_of(one)}
    if not names & (_MISSING | _PERHAPS_MISSING):
        return False
    calls = [call for one in body for call in ast.walk(one) if isinstance(call, ast.Call)]
    called = {_name_of(call) for call in calls if not changes_files(call, None)}
    return bool(called & _READS_FILES) or (bool(names & _MISSING) and not only_changes_files(body))


def suppressed(manager: ast.expr) -> Sequence[ast.expr]:
    """Return the errors that a context manager suppresses, if it is `contextlib.suppress`."""
    return manager.args if isinstance(manager, ast.Call) and _name_of(manager) == "suppress" else ()


def _errors_of(caught: ast.expr | None) -> set[str]:
    match caught:
        case None:
            return {"BaseException"}
        case ast.Tuple(elts=several):
            return {name for one in several for name in _errors_of(one)}
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return {name}
    return set()


def _name_of(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def only_changes_files(statements: Sequence[ast.stmt]) -> bool:
    """Return whether statements only change files, show something, or wait, by the names of their calls."""
    for statement in statements:
        match statement:
            case ast.Pass() | ast.Assert() | ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))):
                if name not in CHANGES_FILES | _IN_FILES | SHOWING | {"sleep"}:
                    return False
            case ast.With(items=[ast.withitem(context_expr=ast.Call())], body=body):
                if not only_changes_files(body):
                    return False
            case ast.If(body=body, orelse=orelse) | ast.For(body=body, orelse=orelse):
                if not only_changes_files([*body, *orelse]):
                    return False
            case _:
                return False
    return True


def only_keeps_its_parameter(method: ast.AST | None) -> bool:
    """Return whether a method with one parameter only sets attributes to that: `self.epoch = epoch`."""
    match method:
        case ast.FunctionDef(args=ast.arguments(args=[ast.arg(this), ast.arg(given)]), body=body):
            if ast.get_docstring(method) is not None:
                body = body[1:]
            return all(_sets_attribute(statement, this, given) for statement in body)
    return False


def _sets_attribute(statement: ast.stmt, this: str, given: str) -> bool:
    match statement:
        case ast.Assign([ast.Attribute(ast.Name(owner))], ast.Name(name) | ast.Call(ast.Name("int"), [ast.Name(name)])):
            return (owner, name) == (this, given)
    return False


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Values of parameters that a call may leave out."""
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    values = function.__defaults__ or ()
    names = positional[len(positional) - len(values) :]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}


def union(uses: Sequence[Use]) -> Use:
    found: set[Key] = set()
    for use in uses:
        if use is None:
            return None
        found |= use
    return frozenset(found)
