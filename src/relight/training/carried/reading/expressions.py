"""Reads expressions of a script: each place that they read, and what that feeds."""

import ast
from types import FunctionType, MethodType
from typing import TYPE_CHECKING

from relight.training.carried.code.refs import (
    UNKNOWN,
    Key,
    Ref,
    attribute_of,
    has_contents,
    is_iterator,
    item_of,
    own_accessor,
    own_method,
)
from relight.training.carried.reading.flow import Use
from relight.training.carried.reading.syntax import MOST_MEMBERS, MUTATORS, NO_NAME, constant_of, known, union

if TYPE_CHECKING:
    from relight.training.carried.reading.reading import Reading

_FRESH: Key = ("temporary", -1, "")


class Expressions:
    """Evaluates expressions."""

    def __init__(self, reading: "Reading") -> None:
        self._reading = reading
        self._flow = reading.flow

    def refer(self, node: ast.expr) -> Ref:
        """The referent of an expression, without reading it."""
        match node:
            case ast.Name():
                return self._reading.scope.lookup(node.id)
            case ast.Attribute():
                return attribute_of(self.refer(node.value), node.attr, self._reading.is_foreign)
            case ast.Subscript():
                return item_of(self.refer(node.value), constant_of(node.slice))
            case ast.Constant():
                return Ref(None, node.value)
            case _:
                return Ref()

    def value(self, node: ast.expr, use: Use, *, whole: bool = True) -> Ref:
        """Evaluate: everything in it is read. Returns what it names.

        `whole`: with all that the value holds; False: on the way to a member of it.
        """
        match node:
            case ast.Name():
                ref = self.refer(node)
                self._flow.read(ref, use, whole=whole)
                if ref.alias is not None and ref.alias.key is not None:
                    self._flow.feed(ref.alias.key, use)
                return ref
            case ast.Attribute():
                base = self.value(node.value, use, whole=False)
                if (getter := own_accessor(known(base), node.attr, "fget")) is not None:
                    return self._reading.functions.run(getter, base, node, use)
                ref = self.refer(node) if base.key is None else attribute_of(base, node.attr, self._reading.is_foreign)
                self._flow.hold(base, ref)
                self._flow.read(ref, use, whole=whole)
                if node.attr in MUTATORS and has_contents(known(base)) and known(base) is not UNKNOWN:
                    self._flow.mutate(base, self._reading.at(node))  # its method is kept, and called elsewhere
                return ref
            case ast.Subscript():
                index = constant_of(node.slice)
                base = self.value(node.value, use, whole=whole and index is UNKNOWN)
                self.value(node.slice, use)
                if (method := own_method(known(base), "__getitem__")) is not None:
                    return self._reading.functions.run(method, base, node, use)
                return item_of(base, index)
            case ast.Call():
                return self._reading.calls.call(node, use, is_statement=False)
            case ast.Lambda():
                self._reading.statements.nested(node.args, node.body)
                return Ref()
            case ast.NamedExpr():
                value = self.value(node.value, union([use, self._reading.into(node.target)]))
                self._reading.assign(node.target, value)
                return value
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._comprehension(node, use)
                return Ref()
            case _:
                parts = [self.value(part, use) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
                if isinstance(node, (ast.IfExp, ast.BoolOp)):
                    return Ref(makes=next((part.makes for part in parts if part.makes is not None), None))
                return Ref()

    def iterate(self, ref: Ref, node: ast.expr | ast.stmt, use: Use) -> None:
        """A loop or a comprehension goes over it."""
        if is_iterator(ref.value):
            self._reading.calls.draw(ref, node, use)
        held = known(ref)
        if isinstance(held, (list, tuple, dict)) and len(held) <= MOST_MEMBERS:
            for one in held.values() if isinstance(held, dict) else held:
                if isinstance(one, (FunctionType, MethodType)):
                    self._reading.functions.pass_on(
                        Ref(ref.key, one, ref.place), ast.copy_location(ast.Call(NO_NAME, [], []), node), use
                    )
        for name in ("__iter__", "__next__", "__aiter__", "__anext__"):
            if (method := own_method(known(ref), name)) is not None:
                self._reading.functions.run(method, ref, node, use)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, use: Use) -> None:
        outer = dict(self._reading.scope.bound)
        for part in node.generators:
            self.iterate(self.value(part.iter, use), node, use)
            names = [name.id for name in ast.walk(part.target) if isinstance(name, ast.Name)]
            self._reading.scope.bound.update({name: Ref(_FRESH) for name in names})
            for condition in part.ifs:
                self.value(condition, use)
        for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.value(value, use)
        self._reading.scope.bound = outer
