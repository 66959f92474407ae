"""Follows calls into functions of the user's: binds their parameters, and reads their bodies."""

import ast
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING

from relight.training.carried.code.refs import Callee, Key, Ref, callee_of, has_contents, own_method, part_of
from relight.training.carried.code.scope import Scope
from relight.training.carried.code.source import node_of
from relight.training.carried.reading.flow import NOWHERE, Use
from relight.training.carried.reading.syntax import defaults_of, is_showing, known, spread, spread_keywords

if TYPE_CHECKING:
    from relight.training.carried.reading.reading import Reading

_DEEPEST = 8
_MOST_CALLS = 300


class Functions:
    """Reads functions of the user's, each at most once on the way to itself."""

    def __init__(self, reading: "Reading") -> None:
        self._reading = reading
        self._flow = reading.flow
        self._calling: list[CodeType] = [scope.code for scope in reading.frames]  # not to be read a second time
        self._calls = 0

    def run(self, function: FunctionType, receiver: Ref, node: ast.expr | ast.stmt, use: Use) -> Ref:
        """An access, an operator or a statement runs a function of the user's."""
        name = ast.copy_location(ast.Name(function.__name__, ast.Load()), node)
        call = ast.copy_location(ast.Call(name, [], []), node)
        self._flow.read(receiver, use)
        return self.enter(Callee(function, receiver), Ref(None, function), call, use) or Ref()

    def pass_on(self, ref: Ref, node: ast.Call, use: Use) -> None:
        """A function of the user's is given to one that is not: as if it were called there."""
        value = known(ref)
        if isinstance(value, (FunctionType, MethodType, partial)) or own_method(value, "__call__") is not None:
            callee = self.placed(callee_of(Ref(ref.key, value, ref.place), None))
            if callee is not None:
                self.enter(callee, ref, ast.copy_location(ast.Call(node.func, [], []), node), use)

    def inherited(self, function: ast.expr) -> Callee | None:
        """The method that `super().name(...)` calls."""
        match function:
            case ast.Attribute(ast.Call(ast.Name("super"), [], []), name):
                code = self._reading.scope.code
                own = self._reading.scope.lookup(code.co_varnames[0]) if code.co_varnames else Ref()
                kinds = type(known(own)).__mro__
                methods = [getattr(vars(kind).get(code.co_name), "__code__", None) for kind in kinds]
                after = kinds[methods.index(code) + 1 :] if code in methods else ()
                found = [vars(kind)[name] for kind in after if name in vars(kind)]
                return callee_of(Ref(None, found[0].__get__(known(own))), own) if found else None
        return None

    def placed(self, callee: Callee | None) -> Callee | None:
        """The object of a bound method has a name somewhere, though not here."""
        if callee is None or callee.receiver is None or callee.receiver.place is not None:
            return callee
        return replace(callee, receiver=self._reading.scope.find(callee.receiver.value))

    def enter(self, callee: Callee, target: Ref, node: ast.Call, use: Use) -> Ref | None:
        """Read a function of the user's, and return what it returns. None: its arguments are still unread."""
        code = callee.function.__code__
        body = node_of(code)
        if code in self._calling or len(self._calling) >= _DEEPEST or self._calls >= _MOST_CALLS or body is None:
            return None
        self._calls += 1
        scope = Scope(code, callee.function.__globals__, len(self._reading.frames) + self._calls)
        scope.function = Ref(target.key, callee.function, target.place)
        scope.frames = self._reading.frames
        self._bind(callee, scope, node, NOWHERE if is_showing(node.func) else None)
        reading = self._reading
        outer = reading.scope, reading.returned, reading.return_use, reading.results
        reading.scope, reading.returned, reading.return_use, reading.results = (
            scope,
            [],
            use,
            [],
        )
        self._calling.append(code)
        if isinstance(body, ast.Lambda):
            self._reading.results.append(self._reading.value(body.body, use))
        else:
            self._reading.statements.body(getattr(body, "body", []))
        self._calling.pop()
        self._flow.merge(*self._reading.returned)
        results = self._reading.results
        reading.scope, reading.returned, reading.return_use, reading.results = outer
        makes = next((one.makes for one in results if one.makes is not None), None)
        return replace(_lasting(results[0]) if len(results) == 1 else Ref(), makes=makes)

    def _bind(self, callee: Callee, scope: Scope, node: ast.Call, use: Use) -> None:
        code = callee.function.__code__
        names = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        keywords = spread_keywords(node.keywords)
        given: dict[str, ast.expr] = {k.arg: k.value for k in keywords if k.arg in names and k.arg is not None}
        rest = [k.value for k in keywords if k.arg not in names]
        positional = names[: code.co_argcount]
        if callee.receiver is not None and positional:
            scope.bound[positional.pop(0)] = callee.receiver
        for name, value in [*zip(positional, callee.given, strict=False), *callee.named.items()]:
            scope.bound[name] = self._reading.scope.find(value)
        positional = [name for name in positional[len(callee.given) :] if name not in callee.named]
        for index, argument in enumerate(spread(node.args)):
            if isinstance(argument, ast.Starred):
                rest.append(argument)
                for name in positional[index:]:
                    scope.bound[name] = part_of(self._reading.refer(argument.value))
                break
            if index >= len(positional):
                rest.append(argument)
            else:
                given[positional[index]] = argument
        for argument in rest:
            self._reading.value(argument, use)
        for name, value in defaults_of(callee.function).items():
            is_given = name in given or name in scope.bound
            if name in names and not is_given and value is not None and has_contents(value):
                place = (*scope.function.place, ("default", name, "")) if scope.function.place else None
                scope.bound[name] = Ref(("default", id(callee.function), name), value, place)
        for name, argument in given.items():
            own: Key = ("temporary", scope.number, name)
            ref = self._reading.value(argument, frozenset({own}), whole=False)
            if isinstance(argument, (ast.Name, ast.Attribute, ast.Subscript)) and ref.key is not None:
                scope.aliases[own] = ref
                scope.values[name] = ref.value


def _lasting(ref: Ref) -> Ref:
    """A function's result, as its caller may name it."""
    if ref.key is not None and ref.key[0] != "temporary":
        return ref
    return ref.alias if ref.alias is not None and ref.alias.key is not None else Ref(None, ref.value)
