"""More places for the variables of a script's loop: holders of other kinds. See `places`."""

import ast
import random

from tests.idioms.reshaped.loops import NotForThis, Shape, begin_with, is_function
from tests.idioms.reshaped.places import HOLDER, chosen, move
from tests.idioms.reshaped.scopes import Scope


def _expression(source: str, name: str, context: ast.expr_context) -> ast.expr:
    made = ast.parse(source.replace("NAME", name), mode="eval").body
    assert isinstance(made, (ast.Attribute, ast.Subscript))
    made.ctx = context
    return made


def _in_holder(tree: ast.Module, scope: Scope, draw: random.Random, source: str, begin: str, first: str = "") -> None:
    """Put an expression in the place of each variable; `begin` makes the holder, `first` begins the module."""
    names = chosen(scope, draw)
    move(scope, names, lambda name, context: _expression(source, name, context))
    if begin:
        begin_with(scope, begin)
    begin_with(tree, first.replace("NAMES", repr(tuple(names))) or "pass")


def in_shared_instance(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of an object that each call of its class returns, or that all of its objects share."""
    one = (
        "    made = None\n    def __new__(cls):\n        if cls.made is None:\n"
        "            cls.made = super().__new__(cls)\n        return cls.made"
    )
    other = "    shared = {}\n    def __init__(self):\n        self.__dict__ = self.shared"
    _in_holder(tree, scope, draw, "Keeper().NAME", "", f"class Keeper:\n{draw.choice((one, other))}")


def in_thread_local(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of a `threading.local`."""
    _in_holder(tree, scope, draw, f"{HOLDER}.NAME", "", f"import threading\n{HOLDER} = threading.local()")


def in_context_variable(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Items of a dictionary that a context variable has."""
    first = f"import contextvars\n{HOLDER} = contextvars.ContextVar('kept')"
    _in_holder(tree, scope, draw, f"{HOLDER}.get()['NAME']", f"{HOLDER}.set({{}})", first)


def in_function_attributes(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of a function."""
    _in_holder(tree, scope, draw, f"{HOLDER}.NAME", "", f"def {HOLDER}():\n    pass")


def in_other_mapping(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Items of a mapping of `collections`, or of a class derived of one."""
    kind = draw.choice(
        (
            "ChainMap({}, {})",
            "UserDict()",
            "OrderedDict()",
            "defaultdict(list)",
            "Counter()",
            "ChainMap({}).new_child()",
        )
    )
    _in_holder(tree, scope, draw, f"{HOLDER}['NAME']", f"{HOLDER} = collections.{kind}", "import collections")


def in_partial(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Keywords of a `functools.partial`."""
    begin = f"{HOLDER} = functools.partial(dict)"
    _in_holder(tree, scope, draw, f"{HOLDER}.keywords['NAME']", begin, "import functools")


def in_nested_containers(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Items of a dictionary in a list in a tuple."""
    _in_holder(tree, scope, draw, f"{HOLDER}[1][0]['NAME']", f"{HOLDER} = (None, [{{}}])")


def in_delegate(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of an object that gives them on to another one."""
    first = (
        "class Kept:\n    pass\nclass Keeper:\n    def __init__(self):\n        self.__dict__['_inner'] = Kept()\n"
        "    def __getattr__(self, name):\n        return getattr(self.__dict__['_inner'], name)\n"
        "    def __setattr__(self, name, value):\n        setattr(self._inner, name, value)\n"
        "    def __delattr__(self, name):\n        delattr(self._inner, name)"
    )
    _in_holder(tree, scope, draw, f"{HOLDER}.NAME", f"{HOLDER} = Keeper()", first)


def in_descriptors(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of an object whose descriptors keep the values."""
    first = (
        "class Kept:\n    def __init__(self):\n        self.values = {}\n"
        "    def __get__(self, owner, kind):\n        return self.values[owner]\n"
        "    def __set__(self, owner, value):\n        self.values[owner] = value\n"
        "    def __delete__(self, owner):\n        del self.values[owner]\n"
        "class Keeper:\n    pass\nfor each_name in NAMES:\n    setattr(Keeper, each_name, Kept())"
    )
    _in_holder(tree, scope, draw, f"{HOLDER}.NAME", f"{HOLDER} = Keeper()", first)


def in_metaclass(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of a class, which its metaclass keeps."""
    first = (
        "class Kind(type):\n    kept = {}\n    def __getattr__(cls, name):\n        return cls.kept[name]\n"
        "    def __setattr__(cls, name, value):\n        cls.kept[name] = value\n"
        "    def __delattr__(cls, name):\n        del cls.kept[name]\n"
        f"class {HOLDER}(metaclass=Kind):\n    pass"
    )
    _in_holder(tree, scope, draw, f"{HOLDER}.NAME", "", first)


def in_simple_namespace(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of a `types.SimpleNamespace`, or items of what `vars` gives of it."""
    source = draw.choice((f"{HOLDER}.NAME", f"vars({HOLDER})['NAME']", f"{HOLDER}.__dict__['NAME']"))
    _in_holder(tree, scope, draw, source, f"{HOLDER} = types.SimpleNamespace()", "import types")


def in_module_attributes(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Attributes of a module that the script has made, or of its own one."""
    begin = draw.choice(
        (f"{HOLDER} = types.ModuleType('kept')", f"{HOLDER} = sys.modules.setdefault('kept', types.ModuleType('kept'))")
    )
    _in_holder(tree, scope, draw, f"{HOLDER}.NAME", "", f"import sys, types\n{begin}")


def in_cells(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Each variable the only item of a list of its own."""
    names = chosen(scope, draw)
    move(scope, names, lambda name, context: _expression("NAME_cell[0]", name, context))
    begin_with(scope, "\n".join(f"{name}_cell = [None]" for name in names))


def in_globals_by_name(tree: ast.Module, scope: Scope, draw: random.Random) -> None:
    """Names of the module, which `globals()` gives."""
    if not is_function(scope):
        raise NotForThis
    _in_holder(tree, scope, draw, "globals()['its_NAME']", "")


HOLDERS: tuple[Shape, ...] = (
    in_shared_instance,
    in_thread_local,
    in_context_variable,
    in_function_attributes,
    in_other_mapping,
    in_partial,
    in_nested_containers,
    in_delegate,
    in_descriptors,
    in_metaclass,
    in_simple_namespace,
    in_module_attributes,
    in_cells,
    in_globals_by_name,
)
