"""Reads expressions of a script, with the calls in them, into a `Flow`."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from relight.training.carried.flow import NOWHERE, Flow, State, Use
from relight.training.carried.refs import (
    UNKNOWN,
    Callee,
    Key,
    Ref,
    attribute_of,
    callee_of,
    class_of,
    container_behind,
    has_contents,
    is_generator,
    is_iterator,
    is_of_a_library,
    item_of,
    own_accessor,
    own_method,
    part_of,
)
from relight.training.carried.scope import Scope
from relight.training.carried.source import node_of
from relight.training.carried.syntax import (
    MUTATORS,
    MUTATORS_OF_FIRST,
    OF_MODULES,
    SAME,
    VIEWS,
    constant_of,
    defaults_of,
    is_in_place,
    is_showing,
    known,
    spread,
    spread_keywords,
    union,
)
from relight.training.torch_private.modules import HOOK_TABLES

_DEEPEST = 8
_MOST_CALLS = 300
_NO_NAME = ast.Name("", ast.Load())
MOST_MEMBERS = 8  # of a container whose members are told from each other
_FRESH: Key = ("temporary", -1, "")


class Expressions:
    """Evaluates expressions, and follows calls of the user's functions; what libraries do with arguments is unknown."""

    def __init__(
        self,
        flow: Flow,
        frames: Sequence[Scope],
        is_foreign: Callable[[Any], bool],
        enters: Callable[[ast.With | ast.AsyncWith], bool],
    ) -> None:
        """`enters`: of a statement of the loop that is `with step`."""
        self._flow = flow
        self._enters = enters
        self._frames = frames
        self._is_foreign = is_foreign
        for scope in frames:
            scope.frames = frames
        self._scope = frames[0]
        self._calling: list[CodeType] = [scope.code for scope in frames]  # not to be read a second time
        self._calls = 0
        self._returned: list[State] = []
        self._return_use: Use = None
        self._results: list[Ref] = []  # of the function that is read

    # --- values ------------------------------------------------------------------------------------------------
    def _refer(self, node: ast.expr) -> Ref:
        """What an expression names, without reading it."""
        match node:
            case ast.Name():
                return self._scope.lookup(node.id)
            case ast.Attribute():
                return attribute_of(self._refer(node.value), node.attr, self._is_foreign)
            case ast.Subscript():
                return item_of(self._refer(node.value), constant_of(node.slice))
            case ast.Constant():
                return Ref(None, node.value)
            case _:
                return Ref()

    def _value(self, node: ast.expr, use: Use, *, whole: bool = True) -> Ref:
        """Evaluate: everything in it is read. Returns what it names.

        `whole`: with all that the value holds; False: on the way to a member of it.
        """
        match node:
            case ast.Name():
                ref = self._refer(node)
                self._flow.read(ref, use, whole=whole)
                if ref.alias is not None and ref.alias.key is not None:
                    self._flow.feed(ref.alias.key, use)
                return ref
            case ast.Attribute():
                base = self._value(node.value, use, whole=False)
                if (getter := own_accessor(known(base), node.attr, "fget")) is not None:
                    return self._run(getter, base, node, use)
                ref = self._refer(node) if base.key is None else attribute_of(base, node.attr, self._is_foreign)
                self._flow.hold(base, ref)
                self._flow.read(ref, use, whole=whole)
                if node.attr in MUTATORS and has_contents(known(base)) and known(base) is not UNKNOWN:
                    self._flow.mutate(base, self._at(node))  # its method is kept, and called elsewhere
                return ref
            case ast.Subscript():
                index = constant_of(node.slice)
                base = self._value(node.value, use, whole=whole and index is UNKNOWN)
                self._value(node.slice, use)
                if (method := own_method(known(base), "__getitem__")) is not None:
                    return self._run(method, base, node, use)
                return item_of(base, index)
            case ast.Call():
                return self._call(node, use, is_statement=False)
            case ast.Lambda():
                self._nested(node.args, node.body)
                return Ref()
            case ast.NamedExpr():
                value = self._value(node.value, union([use, self._into(node.target)]))
                self._assign(node.target, value)
                return value
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._comprehension(node, use)
                return Ref()
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._value(child, use)
                return Ref()

    def _run(self, function: FunctionType, receiver: Ref, node: ast.expr | ast.stmt, use: Use) -> Ref:
        """An access, an operator or a statement runs a function of the user's."""
        name = ast.copy_location(ast.Name(function.__name__, ast.Load()), node)
        call = ast.copy_location(ast.Call(name, [], []), node)
        self._flow.read(receiver, use)
        return self._enter(Callee(function, receiver), Ref(None, function), call, use) or Ref()

    def _iterate(self, ref: Ref, node: ast.expr | ast.stmt, use: Use) -> None:
        """A loop or a comprehension goes over it."""
        if is_iterator(ref.value):
            self._draw(ref, node, use)
        held = known(ref)
        if isinstance(held, (list, tuple, dict)) and len(held) <= MOST_MEMBERS:
            for one in held.values() if isinstance(held, dict) else held:
                if isinstance(one, (FunctionType, MethodType)):
                    self._pass_on(
                        Ref(ref.key, one, ref.place), ast.copy_location(ast.Call(_NO_NAME, [], []), node), use
                    )
        for name in ("__iter__", "__next__"):
            if (method := own_method(known(ref), name)) is not None:
                self._run(method, ref, node, use)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, use: Use) -> None:
        outer = dict(self._scope.bound)
        for part in node.generators:
            self._iterate(self._value(part.iter, use), node, use)
            names = [name.id for name in ast.walk(part.target) if isinstance(name, ast.Name)]
            self._scope.bound.update({name: Ref(_FRESH) for name in names})
            for condition in part.ifs:
                self._value(condition, use)
        for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self._value(value, use)
        self._scope.bound = outer

    # --- calls -------------------------------------------------------------------------------------------------
    def _step(self, owner: Any) -> None:
        if not isinstance(owner, LRScheduler):
            self._flow.step(is_certain=isinstance(owner, (torch.optim.Optimizer, torch.amp.GradScaler)))

    def _call(self, node: ast.Call, use: Use, *, is_statement: bool) -> Ref:
        function = node.func
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        receiver: Ref | None = None
        if is_showing(function):
            use, is_statement = NOWHERE, False
        inherited = self._inherited(function)
        if isinstance(function, ast.Attribute) and inherited is None:
            receiver, changes = self._receiver(node, function, use, is_statement=is_statement)
            if changes:
                into = self._into(function.value)
                self._flow.mutate(receiver, self._at(node))
                for argument in arguments:
                    self._value(argument, into if is_statement else union([into, use]))
                return Ref()
        else:
            self._value(function, None if is_statement else use)  # which function it is decides what comes of it
        if isinstance(function, ast.Call) and getattr(function.func, "id", "") == "getattr" and function.args:
            self._flow.mutate(self._refer(function.args[0]), self._at(node))  # some method of it
        target = self._refer(function)
        if receiver is not None and isinstance(function, ast.Attribute):
            target = attribute_of(receiver, function.attr, self._is_foreign)
        held, method = container_behind(known(target))
        if receiver is None and method in MUTATORS and has_contents(held):
            self._flow.mutate(self._scope.find(held), self._at(node))
        if isinstance(known(target), nn.Module):
            self._flow.read(target, use)  # what it returns depends on all that it holds
            self._run_hooks(target, node)
        callee = inherited or self._placed(callee_of(target, receiver))
        if callee is not None:
            result = self._enter(callee, target, node, NOWHERE if is_statement else use)
            if result is not None:
                return result
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name == "type" and known(target) is type and len(arguments) == 1:
            return class_of(self._value(arguments[0], use))
        return self._call_library(node, name, receiver, use)

    def _receiver(self, node: ast.Call, function: ast.Attribute, use: Use, *, is_statement: bool) -> tuple[Ref, bool]:
        """What stands before the dot of a call, and whether the call changes it."""
        is_named_so = function.attr in MUTATORS
        is_in_place = function.attr[-1] == "_" and function.attr[:1] != "_"
        is_made = isinstance(function.value, (ast.Call, ast.Attribute, ast.Subscript))
        receiver = self._value(function.value, NOWHERE, whole=False) if is_made else self._refer(function.value)
        changes = (is_named_so or is_in_place) and (has_contents(known(receiver)) or receiver.is_part)
        changes |= is_named_so and is_of_a_library(known(receiver))
        draws = is_generator(known(receiver)) or is_iterator(known(receiver))
        is_own = own_method(known(receiver), function.attr) is not None
        if function.attr == "step" and not is_own:
            self._step(known(receiver))
        self._value(function.value, NOWHERE if is_statement and (changes or draws) else use, whole=not is_own)
        if draws:
            self._draw(receiver, node, use)
        return receiver, changes and not draws

    def _call_library(self, node: ast.Call, name: str, receiver: Ref | None, use: Use) -> Ref:
        """A function that is not the user's: its name tells what it does with its arguments."""
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        last = Ref()
        for index, argument in enumerate(arguments):
            last = ref = self._value(argument, use)
            self._pass_on(ref, node, use)
            if is_generator(ref.value) or is_iterator(ref.value):
                self._draw(ref, node, use)
            elif index == 0 and name == "setattr" and len(arguments) > 1:
                self._flow.set_on_tensor(str(constant_of(arguments[1])))
                self._flow.mutate(ref, self._at(node))
            elif index == 0 and name != "next" and (name in MUTATORS_OF_FIRST or is_in_place(name)):
                self._flow.mutate(ref, self._at(node))
        for keyword in node.keywords:
            if keyword.arg in ("out", "file"):
                self._flow.mutate(self._refer(keyword.value), self._at(node))
        if receiver is not None and name in VIEWS and has_contents(known(receiver)):
            return part_of(receiver)
        if receiver is not None and name in OF_MODULES and isinstance(known(receiver), nn.Module):
            return part_of(receiver)
        if name in SAME and len(arguments) == 1:
            return self._refer(arguments[0]) if not isinstance(arguments[0], ast.Call) else last
        return Ref()

    def _pass_on(self, ref: Ref, node: ast.Call, use: Use) -> None:
        """A function of the user's is given to one that is not: as if it were called there."""
        value = known(ref)
        if isinstance(value, (FunctionType, MethodType)):
            callee = self._placed(callee_of(Ref(ref.key, value, ref.place), None))
            if callee is not None:
                self._enter(callee, ref, ast.copy_location(ast.Call(node.func, [], []), node), use)

    def _run_hooks(self, target: Ref, node: ast.Call) -> None:
        """Functions of the user's that calling a module runs, or the backward pass of what it returns."""
        for path, module in known(target).named_modules():
            steps = tuple(("attribute", name, "") for name in path.split(".") if name)
            for kind in HOOK_TABLES:
                for number, hook in enumerate(list(getattr(module, kind, {}).values())):
                    way = (*steps, ("attribute", kind, ""), ("member", str(number), ""))
                    place = (*target.place, *way) if target.place else None
                    call = ast.copy_location(ast.Call(_NO_NAME, [], []), node)
                    self._pass_on(Ref(("hook", id(hook)), hook, place), call, None)

    def _inherited(self, function: ast.expr) -> Callee | None:
        """The method that `super().name(...)` calls."""
        match function:
            case ast.Attribute(ast.Call(ast.Name("super"), [], []), name):
                code = self._scope.code
                own = self._scope.lookup(code.co_varnames[0]) if code.co_varnames else Ref()
                kinds = type(known(own)).__mro__
                methods = [getattr(vars(kind).get(code.co_name), "__code__", None) for kind in kinds]
                after = kinds[methods.index(code) + 1 :] if code in methods else ()
                found = [vars(kind)[name] for kind in after if name in vars(kind)]
                return callee_of(Ref(None, found[0].__get__(known(own))), own) if found else None
        return None

    def _placed(self, callee: Callee | None) -> Callee | None:
        """The object of a bound method has a name somewhere, though not here."""
        if callee is None or callee.receiver is None or callee.receiver.place is not None:
            return callee
        return replace(callee, receiver=self._scope.find(callee.receiver.value))

    def _draw(self, ref: Ref, node: ast.AST, use: Use) -> None:
        """A generator or iterator goes on."""
        self._flow.read(ref, use)
        self._flow.mutate(ref, self._at(node))

    def _enter(self, callee: Callee, target: Ref, node: ast.Call, use: Use) -> Ref | None:
        """Read a function of the user's, and return what it returns. None: its arguments are still unread."""
        code = callee.function.__code__
        body = node_of(code)
        if code in self._calling or len(self._calling) >= _DEEPEST or self._calls >= _MOST_CALLS or body is None:
            return None
        self._calls += 1
        scope = Scope(code, callee.function.__globals__, len(self._frames) + self._calls)
        scope.function = Ref(target.key, callee.function, target.place)
        scope.frames = self._frames
        self._bind(callee, scope, node, NOWHERE if is_showing(node.func) else None)
        outer = self._scope, self._returned, self._return_use, self._results
        self._scope, self._returned, self._return_use, self._results = scope, [], use, []
        self._calling.append(code)
        if isinstance(body, ast.Lambda):
            self._results.append(self._value(body.body, use))
        else:
            self._body(getattr(body, "body", []))
        self._calling.pop()
        self._flow.merge(*self._returned)
        results = self._results
        self._scope, self._returned, self._return_use, self._results = outer
        return _lasting(results[0]) if len(results) == 1 else Ref()

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
            scope.bound[name] = self._scope.find(value)
        positional = [name for name in positional[len(callee.given) :] if name not in callee.named]
        for index, argument in enumerate(spread(node.args)):
            if isinstance(argument, ast.Starred):
                rest.append(argument)
                for name in positional[index:]:
                    scope.bound[name] = part_of(self._refer(argument.value))
                break
            if index >= len(positional):
                rest.append(argument)
            else:
                given[positional[index]] = argument
        for argument in rest:
            self._value(argument, use)
        for name, value in defaults_of(callee.function).items():
            is_given = name in given or name in scope.bound
            if name in names and not is_given and value is not None and has_contents(value):
                place = (*scope.function.place, ("default", name, "")) if scope.function.place else None
                scope.bound[name] = Ref(("default", id(callee.function), name), value, place)
        for name, argument in given.items():
            own: Key = ("temporary", scope.number, name)
            ref = self._value(argument, frozenset({own}), whole=False)
            if isinstance(argument, (ast.Name, ast.Attribute, ast.Subscript)) and ref.key is not None:
                scope.aliases[own] = ref
                scope.values[name] = ref.value

    # --- of statements -----------------------------------------------------------------------------------------
    def _body(self, statements: Sequence[ast.stmt]) -> None:
        raise NotImplementedError

    def _nested(self, arguments: ast.arguments, body: Sequence[ast.stmt] | ast.expr) -> None:
        raise NotImplementedError

    def _assign(self, target: ast.expr, value: Ref) -> None:
        raise NotImplementedError

    def _into(self, target: ast.expr) -> Use:
        raise NotImplementedError

    def _at(self, node: ast.AST) -> tuple[str, int]:
        return self._scope.code.co_filename, getattr(node, "lineno", 0)


def _lasting(ref: Ref) -> Ref:
    """What a function returns, as its caller may name it."""
    if ref.key is not None and ref.key[0] != "temporary":
        return ref
    return ref.alias if ref.alias is not None and ref.alias.key is not None else Ref(None, ref.value)
