"""Reads statements of a script in the order in which they run, into a `Flow`."""

import ast
from collections.abc import Sequence

import torch

from relight.training.carried.expressions import MOST_MEMBERS, Expressions
from relight.training.carried.flow import NOWHERE, Use
from relight.training.carried.refs import (
    UNKNOWN,
    Ref,
    attribute_of,
    has_contents,
    item_of,
    own_accessor,
    own_method,
    part_of,
    sets_otherwise,
)
from relight.training.carried.scope import Scope
from relight.training.carried.syntax import MUTATORS, is_showing, known, union

_DEEPEST_LOOPS = 2  # in which members are told from each other


def _member(base: Ref, index: int) -> Ref:
    """A member of a container, by its number."""
    held = known(base)
    if isinstance(held, dict):
        keys = list(held)
        return item_of(base, keys[index]) if index < len(keys) else Ref()
    return item_of(base, index) if isinstance(held, (list, tuple)) and index < len(held) else part_of(base)


class Reader(Expressions):
    """Reads what one iteration executes."""

    _loops = 0  # around what is read

    def read(self, scope: Scope, statements: Sequence[ast.stmt], *, returns: bool) -> None:
        """Statements of one of the loop's frames. `returns`: what follows is run after a `return` too."""
        self._scope = scope
        self._body(statements)
        if returns:
            self._flow.merge(*self._returned)
        self._returned.clear()

    # --- statements --------------------------------------------------------------------------------------------
    def _body(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Call() as call):
                self._call(call, None, is_statement=True)
            case ast.Expr():
                self._value(node.value, NOWHERE)
            case ast.Assign():
                use = union([self._into(target) for target in node.targets])
                value = self._value(node.value, use)
                for target in node.targets:
                    self._assign(target, value)
            case ast.AnnAssign(value=ast.expr() as right):
                self._assign(node.target, self._value(right, self._into(node.target)))
            case ast.AugAssign():
                into = self._into(node.target)
                self._value(node.target, into)
                self._value(node.value, into)
                self._assign(node.target, Ref())
            case ast.If():
                self._value(node.test, union([self._effect(node.body), self._effect(node.orelse)]))
                self._branches([node.body, node.orelse])
            case ast.Match():
                self._value(node.subject, None)
                self._branches([*(case.body for case in node.cases), []])
            case ast.For() | ast.AsyncFor():
                self._for(node)
            case ast.While():
                self._value(node.test, None)
                self._loop(node.body)
                self._body(node.orelse)
            case ast.With() | ast.AsyncWith():
                self._with(node)
            case ast.Try() | ast.TryStar():
                self._try(node)
            case ast.Return():
                if node.value is not None:
                    self._results.append(self._value(node.value, self._return_use))
                self._returned.append(self._flow.state)
                self._flow.state = None
            case ast.Continue() | ast.Break() | ast.Raise():
                if isinstance(node, ast.Raise) and node.exc is not None:
                    self._value(node.exc, NOWHERE)
                elif not self._loops:
                    self._flow.end_turn()
                self._flow.state = None
            case ast.Assert():
                self._value(node.test, NOWHERE)
            case ast.Delete():
                for target in node.targets:
                    self._assign(target, Ref())
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._nested(node.args, node.body)
                self._flow.write(self._scope.lookup(node.name), self._at(node))
            case ast.ClassDef():
                self._flow.write(self._scope.lookup(node.name), self._at(node))
            case ast.Import() | ast.ImportFrom():
                for name in node.names:
                    self._flow.write(self._scope.lookup(name.asname or name.name.partition(".")[0]), self._at(node))
            case _:
                pass

    def _branches(self, bodies: Sequence[Sequence[ast.stmt]]) -> None:
        start, late, ends = self._flow.state, self._flow.late, []
        ends_late = late
        for body in bodies:
            self._flow.state, self._flow.late = None if start is None else set(start), late
            self._body(body)
            ends.append(self._flow.state)
            ends_late |= self._flow.late
        self._flow.state, self._flow.late = None, ends_late
        self._flow.merge(*ends)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        enters = self._enters(node)
        managers = []
        for item in node.items:
            value = self._value(item.context_expr, None)
            if not enters and (method := own_method(known(value), "__enter__")) is not None:
                self._run(method, value, node, None)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value)
            managers.append(value)
        if enters:
            self._flow.late = False
            self._body(node.body)
            self._flow.late = True
            return
        self._body(node.body)
        for value in managers:
            if (method := own_method(known(value), "__exit__")) is not None:
                self._run(method, value, node, None)

    def _loop(self, body: Sequence[ast.stmt]) -> None:
        """It may run not at all."""
        start = self._flow.state
        self._flow.state = None if start is None else set(start)
        self._loops += 1
        self._body(body)
        self._loops -= 1
        self._flow.state = start

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        ref = self._value(node.iter, self._effect(node.body))
        self._iterate(ref, node, None)
        start = self._flow.state
        self._flow.state = None if start is None else set(start)
        for members in self._turns(node.iter, ref):
            self._assign(node.target, Ref())
            self._bind_members(node.target, members)
            self._loop(node.body)
        self._flow.state = start
        self._body(node.orelse)

    def _turns(self, over: ast.expr, ref: Ref) -> list[list[Ref]]:
        """What a loop's targets stand for, in turns that differ: one for each member, if these are told apart."""
        if isinstance(over, (ast.Tuple, ast.List)) and 0 < len(over.elts) <= MOST_MEMBERS:
            return [[self._refer(one)] for one in over.elts]
        bases = [ref]
        if isinstance(over, ast.Call):
            name = over.func.id if isinstance(over.func, ast.Name) else getattr(over.func, "attr", "")
            if name in ("items", "values") and isinstance(over.func, ast.Attribute):
                bases = [Ref()] * (name == "items") + [self._refer(over.func.value)]
            elif name in ("enumerate", "zip", "reversed", "sorted", "list", "tuple", "iter"):
                bases = [Ref()] * (name == "enumerate") + [self._value(one, NOWHERE, whole=False) for one in over.args]
        held = [known(base) for base in bases]
        longest = max((len(one) for one in held if isinstance(one, (list, tuple, dict))), default=0)
        is_told = 0 < longest <= MOST_MEMBERS and self._loops < _DEEPEST_LOOPS
        if not is_told:
            return [[part_of(base) for base in bases]]
        return [[_member(base, index) for base in bases] for index in range(longest)]

    def _bind_members(self, target: ast.expr, members: Sequence[Ref]) -> None:
        names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        if len(names) == len(members):
            for name, member in zip(names, members, strict=True):
                if isinstance(name, ast.Name) and member.key is not None:
                    self._assign(name, member)

    def _try(self, node: ast.Try | ast.TryStar) -> None:
        start = self._flow.state
        before = None if start is None else set(start)
        self._body(node.body)
        self._body(node.orelse)
        ends = [self._flow.state]
        for handler in node.handlers:
            self._flow.state = None if before is None else set(before)
            self._body(handler.body)
            ends.append(self._flow.state)
        self._flow.state = None
        self._flow.merge(*ends)
        self._body(node.finalbody)

    def _nested(self, arguments: ast.arguments, body: Sequence[ast.stmt] | ast.expr) -> None:
        """A function defined here, as if it were called here, if at all."""
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names = {argument.arg for argument in (*parameters, arguments.vararg, arguments.kwarg) if argument}
        if not isinstance(body, ast.expr):
            inside = [node for statement in body for node in ast.walk(statement)]
            shared = {name for node in inside if isinstance(node, (ast.Nonlocal, ast.Global)) for name in node.names}
            stored = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            names |= stored - shared
        outer, state, use = dict(self._scope.bound), self._flow.state, self._return_use
        self._scope.bound.update({name: Ref(("temporary", -2, name)) for name in names})
        self._flow.state = None if state is None else set(state)
        self._return_use, returned = None, len(self._returned)
        if isinstance(body, ast.expr):
            self._value(body, None)
        else:
            self._body(body)
        del self._returned[returned:]
        self._return_use = use
        self._scope.bound, self._flow.state = outer, state

    # --- what is set -----------------------------------------------------------------------------------------
    def _assign(self, target: ast.expr, value: Ref) -> None:
        where = self._at(target)
        match target:
            case ast.Name():
                ref = self._scope.lookup(target.id)
                if ref.key is not None:
                    self._scope.aliases.pop(ref.key, None)
                    if value.key not in (None, ref.key) and isinstance(target.ctx, ast.Store):
                        self._scope.aliases[ref.key] = value
                self._flow.write(Ref(ref.key, ref.value, ref.place), where)
            case ast.Attribute():
                base = self._value(target.value, NOWHERE, whole=False)
                if known(base) is UNKNOWN or isinstance(known(base), torch.Tensor):
                    self._flow.set_on_tensor(target.attr)
                if (setter := own_accessor(known(base), target.attr, "fset")) is not None:
                    self._run(setter, base, target, None)
                    return
                if sets_otherwise(known(base), target.attr):
                    self._flow.mutate(base, where)
                    return
                ref = attribute_of(base, target.attr, self._is_foreign)
                if (base.is_part and base.value is UNKNOWN) or (ref.key is None and has_contents(base.value)):
                    self._flow.mutate(base, where)
                else:
                    self._flow.hold(base, ref)
                    self._flow.write(ref, where)
            case ast.Subscript():
                base = self._value(target.value, NOWHERE, whole=False)
                self._value(target.slice, self._into(target))
                if (method := own_method(known(base), "__setitem__")) is not None:
                    self._run(method, base, target, None)
                self._flow.mutate(base, where)
            case ast.Tuple() | ast.List():
                for part in target.elts:
                    self._assign(part, Ref())
            case ast.Starred():
                self._assign(target.value, Ref())
            case _:
                pass

    def _into(self, target: ast.expr) -> Use:
        """What a value goes into that is assigned to `target`."""
        match target:
            case ast.Name() | ast.Attribute() | ast.Subscript():
                ref = self._refer(target)
                if ref.key is None:
                    return None
                keys = [ref.key] if ref.alias is None or isinstance(target, ast.Name) else [ref.key, ref.alias.key]
                return frozenset(key for key in keys if key is not None)
            case ast.Tuple() | ast.List():
                return union([self._into(part) for part in target.elts])
            case ast.Starred():
                return self._into(target.value)
            case _:
                return None

    def _effect(self, body: Sequence[ast.stmt]) -> Use:
        """What a condition decides in front of these statements."""
        found: list[Use] = []
        for node in body:
            match node:
                case ast.Assign():
                    found += [self._into(target) for target in node.targets]
                case ast.AugAssign() | ast.AnnAssign():
                    found.append(self._into(node.target))
                case ast.If():
                    found += [self._effect(node.body), self._effect(node.orelse)]
                case ast.Expr(value=ast.Call(func=function)) if is_showing(function):
                    pass
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=base, attr=name))) if name in MUTATORS:
                    found.append(self._into(base))
                case ast.Pass() | ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    return None
        return union(found)
