"""Reads methods that an integration calls in steps: there is no loop of the script's own to read."""

import ast
import dis
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relight.script_files import is_user_type
from relight.training.carried.code.refs import Ref, callee_of
from relight.training.carried.code.scope import Scope
from relight.training.carried.reading.flow import NOWHERE, Flow
from relight.training.carried.reading.making import Made
from relight.training.carried.reading.reading import Reading

_CALL = ast.Call(ast.Name("hook", ast.Load(), lineno=0), [], [], lineno=0)


def made_in(
    hooks: Sequence[types.MethodType], given: Mapping[str, Any], is_foreign: Callable[[Any], bool]
) -> Made | None:
    """Return what some hook makes, and no replacement could get.

    That is a layer where a module that was handed over has none, an optimizer, or torch's average of weights.

    `given`: what hooks get, by the names of their parameters.
    """
    flow = Flow()
    reading = Reading(flow, [Scope(made_in.__code__, {}, 0)], is_foreign, lambda _: False)
    reading.making.set_on_modules = _set_by({type(hook.__self__) for hook in hooks})
    for hook in hooks:
        callee = callee_of(Ref(None, hook), None)
        if callee is None:
            continue  # a library's
        code = callee.function.__code__
        callee.named.update({name: given[name] for name in code.co_varnames[: code.co_argcount] if name in given})
        flow.state = set()  # a hook may run in any step
        reading.functions.enter(callee, Ref(None, hook), _CALL, NOWHERE)
    flow.state = set()
    flow.end_turn()
    return reading.making.new_layer(is_absent=True) or reading.making.new_writer()


def _set_by(kinds: set[type]) -> frozenset[str]:
    """Attributes that methods of these classes may set, in some step."""
    bases = {base for kind in kinds for base in kind.__mro__ if is_user_type(base)}
    methods = [one for base in bases for name, one in vars(base).items() if name != "__init__"]
    codes = [method.__code__ for method in methods if isinstance(method, types.FunctionType)]
    return frozenset(
        each.argval for code in codes for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"
    )
