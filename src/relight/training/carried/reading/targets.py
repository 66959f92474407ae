"""Reads the left sides of assignments: what a statement sets, and what a value goes into."""

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from relight.training.carried.code.refs import (
    UNKNOWN,
    Ref,
    attribute_of,
    has_contents,
    own_accessor,
    own_method,
    sets_otherwise,
)
from relight.training.carried.reading.flow import NOWHERE, Use
from relight.training.carried.reading.syntax import MUTATORS, is_showing, known, union
from relight.training.state.values.cells import is_type_of_cells

if TYPE_CHECKING:
    from relight.training.carried.reading.reading import Reading


class Targets:
    """Assigns to names, attributes and members."""

    def __init__(self, reading: "Reading") -> None:
        self._reading = reading
        self._flow = reading.flow

    def assign(self, target: ast.expr, value: Ref) -> None:
        where = self._reading.at(target)
        match target:
            case ast.Name():
                ref = self._reading.scope.lookup(target.id)
                if ref.key is not None:
                    self._reading.scope.aliases.pop(ref.key, None)
                    self._flow.outside.discard(ref.key)
                    if value.key not in (None, ref.key) and isinstance(target.ctx, ast.Store):
                        self._reading.scope.aliases[ref.key] = value
                self._flow.write(Ref(ref.key, ref.value, ref.place), where)
            case ast.Attribute():
                base = self._reading.value(target.value, NOWHERE, whole=False)
                if known(base) is UNKNOWN or isinstance(known(base), torch.Tensor):
                    self._flow.set_on_tensor(target.attr)
                if (setter := own_accessor(known(base), target.attr, "fset")) is not None:
                    self._reading.functions.run(setter, base, target, None)
                    return
                if sets_otherwise(known(base), target.attr) or is_type_of_cells(type(known(base))):
                    self._flow.mutate(base, where)
                    return
                ref = attribute_of(base, target.attr, self._reading.is_foreign)
                if (base.is_part and base.value is UNKNOWN) or (ref.key is None and has_contents(base.value)):
                    self._flow.mutate(base, where)
                else:
                    self._flow.hold(base, ref)
                    self._flow.write(ref, where)
            case ast.Subscript():
                base = self._reading.value(target.value, NOWHERE, whole=False)
                self._reading.value(target.slice, self.into(target))
                if (method := own_method(known(base), "__setitem__")) is not None:
                    self._reading.functions.run(method, base, target, None)
                self._flow.mutate(base, where)
            case ast.Tuple() | ast.List():
                for part in target.elts:
                    self.assign(part, Ref())
            case ast.Starred():
                self.assign(target.value, Ref())
            case _:
                pass

    def see_outside(self, target: ast.expr, value: ast.expr | None, ref: Ref) -> None:
        """A name was set to `value` (None: to a member of it): if that is no script's, to set a part has an effect."""
        is_read = value is None or isinstance(value, (ast.Attribute, ast.Subscript, ast.Name))
        if not isinstance(target, ast.Name) or not is_read:
            return
        if ref.key is None or self._is_foreign(ref) or (value is not None and self._is_outside(value)):
            key = self._reading.scope.lookup(target.id).key
            if key is not None:
                self._flow.outside.add(key)

    def _is_foreign(self, ref: Ref) -> bool:
        whole = ref.value if ref.key is None else self._flow.values.get(ref.key, ref.value)
        return whole is not UNKNOWN and self._reading.is_foreign(whole)

    def into(self, target: ast.expr) -> Use:
        """Places that a value goes into which is assigned to `target`."""
        if isinstance(target, (ast.Attribute, ast.Subscript)) and self._is_outside(target):
            return None
        match target:
            case ast.Name() | ast.Attribute() | ast.Subscript():
                ref = self._reading.refer(target)
                if ref.key is None:
                    return None
                keys = [ref.key] if ref.alias is None or isinstance(target, ast.Name) else [ref.key, ref.alias.key]
                return frozenset(key for key in keys if key is not None)
            case ast.Tuple() | ast.List():
                return union([self.into(part) for part in target.elts])
            case ast.Starred():
                return self.into(target.value)
            case _:
                return None

    def into_changed(self, target: ast.expr) -> Use:
        """Places that a value goes into by which the value of `target` is changed in place: also what it stands for."""
        if self._is_outside(target):
            return None
        into, alias = self.into(target), self._reading.refer(target).alias
        if into is None or alias is None or alias.key is None:
            return into
        return into | {alias.key} if alias.is_part or has_contents(alias.value) else into

    def _is_outside(self, target: ast.expr) -> bool:
        """Return whether an expression is a name that stands for something outside, or leads on from one."""
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
        if not isinstance(target, ast.Name):
            return False
        ref = self._reading.scope.lookup(target.id)
        alias = self._reading.scope.aliases.get(ref.key) if ref.key is not None else None
        return ref.key in self._flow.outside or self._is_foreign(ref if alias is None else alias)

    def effect(self, body: Sequence[ast.stmt]) -> Use:
        """Places that a condition decides in front of these statements."""
        found: list[Use] = []
        for node in body:
            match node:
                case ast.Assign():
                    found += [self.into(target) for target in node.targets]
                case ast.AugAssign() | ast.AnnAssign():
                    found.append(self.into(node.target))
                case ast.If():
                    found += [self.effect(node.body), self.effect(node.orelse)]
                case ast.Expr(value=ast.Call(func=function)) if is_showing(function):
                    pass
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=base, attr=name))) if name in MUTATORS:
                    found.append(self.into(base))
                case ast.Pass() | ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    return None
        return union(found)
