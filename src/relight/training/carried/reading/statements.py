"""Reads statements of a script in the order in which they run: branches, loops, functions that they define."""

import ast
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relight.training.carried.code.refs import Ref, item_of, own_method, part_of
from relight.training.carried.reading.flow import FILES, NOWHERE, Use
from relight.training.carried.reading.syntax import (
    MOST_MEMBERS,
    asks_by_failing,
    known,
    only_changes_files,
    suppressed,
    union,
)

if TYPE_CHECKING:
    from relight.training.carried.reading.reading import Reading

_DEEPEST_LOOPS = 2  # in which members of a container are distinguished


class Statements:
    """Reads statements."""

    def __init__(self, reading: "Reading") -> None:
        self._reading = reading
        self._flow = reading.flow
        self._loops = 0  # around the statement that is read

    def body(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._reading.unfreezing.note(statement)
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Call() as call):
                self._reading.calls.call(call, None, is_statement=True)
            case ast.Expr():
                self._reading.value(node.value, NOWHERE)
            case ast.Assign():
                use = union([self._reading.into(target) for target in node.targets])
                value = self._reading.value(node.value, use)
                self._reading.making.assign(node.targets, node.value, value)
                for target in node.targets:
                    self._reading.assign(target, value)
                    self._reading.targets.see_outside(target, node.value, value)
            case ast.AnnAssign(value=ast.expr() as right):
                value = self._reading.value(right, self._reading.into(node.target))
                self._reading.making.assign([node.target], right, value)
                self._reading.assign(node.target, value)
            case ast.AugAssign():
                into = self._reading.into_changed(node.target)
                self._reading.value(node.target, into)
                self._reading.value(node.value, into)
                self._reading.assign(node.target, Ref())
            case ast.If():
                effect = self._reading.targets.effect
                self._condition(node, union([effect(node.body), effect(node.orelse)]))
                self._branches([node.body, node.orelse], node.test)
            case ast.Match():
                self._reading.value(node.subject, None)
                self._branches([*(case.body for case in node.cases), []])
            case ast.For() | ast.AsyncFor():
                self._for(node)
            case ast.While():
                self._condition(node, None)
                self._loop(node.body)
                self.body(node.orelse)
            case ast.With() | ast.AsyncWith():
                self._with(node)
            case ast.Try() | ast.TryStar():
                self._try(node)
            case ast.Return():
                if node.value is not None:
                    value = self._reading.value(node.value, self._reading.return_use)
                    self._reading.results.append(self._reading.making.named(value))
                self._reading.returned.append(self._flow.state)
                self._flow.state = None
            case ast.Continue() | ast.Break() | ast.Raise():
                if isinstance(node, ast.Raise) and node.exc is not None:
                    self._reading.value(node.exc, NOWHERE)
                elif not self._loops:
                    self._flow.end_turn()
                self._flow.state = None
            case ast.Assert():
                self._reading.value(node.test, NOWHERE)
            case ast.Delete():
                for target in node.targets:
                    self._reading.assign(target, Ref())
            case _:
                self._definition(node)

    def _condition(self, node: ast.If | ast.While, use: Use) -> None:
        with self._flow.for_files(only_changes_files([*node.body, *node.orelse])):
            self._reading.value(node.test, use)

    def _definition(self, node: ast.stmt) -> None:
        reading = self._reading
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.nested(node.args, node.body)
                self._flow.write(reading.scope.lookup(node.name), reading.at(node))
            case ast.ClassDef():
                self._flow.write(reading.scope.lookup(node.name), reading.at(node))
            case ast.Import() | ast.ImportFrom():
                for name in node.names:
                    self._flow.write(reading.scope.lookup(name.asname or name.name.partition(".")[0]), reading.at(node))
            case _:
                pass

    def _branches(self, bodies: Sequence[Sequence[ast.stmt]], test: ast.expr | None = None) -> None:
        start, late, ends = self._flow.state, self._flow.late, []
        ends_late = late
        for body in bodies:
            self._flow.state, self._flow.late = None if start is None else set(start), late
            with self._reading.making.under(test, holds=body is bodies[0]):
                self.body(body)
            ends.append(self._flow.state)
            ends_late |= self._flow.late
        self._flow.state, self._flow.late = None, ends_late
        self._flow.merge(*ends)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        enters = self._reading.enters(node)
        managers = []
        for item in node.items:
            value = self._reading.value(item.context_expr, None)
            if not enters:
                self._run_own(value, ("__enter__", "__aenter__"), node)
            if enters and item is node.items[-1]:
                self._flow.late = False  # the step has begun when its batch is stored
            if item.optional_vars is not None:
                batch = Ref(("temporary", -1, ""))  # no part of the step
                self._reading.assign(item.optional_vars, batch if enters else value)
            managers.append(value)
            if asks_by_failing(node.body, suppressed(item.context_expr)):
                self._flow.read(FILES, self._reading.targets.effect(node.body))
        if enters:
            self.body(node.body)
            self._flow.late = True
            return
        self.body(node.body)
        for value in managers:
            self._run_own(value, ("__exit__", "__aexit__"), node)

    def _run_own(self, value: Ref, names: Sequence[str], node: ast.stmt) -> None:
        for name in names:
            if (method := own_method(known(value), name)) is not None:
                self._reading.functions.run(method, value, node, None)

    def _loop(self, body: Sequence[ast.stmt]) -> None:
        """Read the body of a loop, which may not run at all."""
        start = self._flow.state
        self._flow.state = None if start is None else set(start)
        self._loops += 1
        self.body(body)
        self._loops -= 1
        self._flow.state = start

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        with self._flow.for_files(only_changes_files(node.body)):
            ref = self._reading.value(node.iter, self._reading.targets.effect(node.body))
        self._reading.expressions.iterate(ref, node, None)
        start = self._flow.state
        self._flow.state = None if start is None else set(start)
        for members in self._turns(node.iter, ref):
            self._reading.assign(node.target, Ref())
            self._bind_members(node.target, members)
            self._loop(node.body)
        self._flow.state = start
        self.body(node.orelse)

    def _turns(self, over: ast.expr, ref: Ref) -> list[list[Ref]]:
        """The referents of a loop's targets, in turns that differ: one for each member that is distinguished."""
        bases = self._containers(over)
        if not bases and isinstance(over, (ast.Tuple, ast.List)) and 0 < len(over.elts) <= MOST_MEMBERS:
            return [[self._reading.refer(one)] for one in over.elts]
        bases = bases or [ref]
        held = [known(base) for base in bases]
        longest = max((len(one) for one in held if isinstance(one, (list, tuple, dict, deque))), default=0)
        is_told = 0 < longest <= MOST_MEMBERS and self._loops < _DEEPEST_LOOPS
        if not is_told:
            return [[part_of(base) for base in bases]]
        return [[_member(base, index) for base in bases] for index in range(longest)]

    def _containers(self, over: ast.expr) -> list[Ref]:
        """Return the containers whose members a loop goes over, side by side. Empty: it goes over a value."""
        match over:
            case ast.Call(ast.Attribute(holder, "items"), []):
                return [Ref(), self._reading.refer(holder)]
            case ast.Call(ast.Attribute(holder, "values" | "copy"), []):
                return [self._reading.refer(holder)]
            case ast.Call(ast.Name("enumerate"), [one, *_]):
                return [Ref(), self._container(one)]
            case ast.Call(ast.Name("zip"), several):
                return [self._container(one) for one in several]
            case ast.Call(ast.Name("list" | "tuple" | "iter" | "reversed" | "sorted"), [one, *_]):
                return self._containers(one) or [self._reading.value(one, NOWHERE, whole=False)]
            case ast.List([ast.Starred(one)]) | ast.Tuple([ast.Starred(one)]):
                return self._containers(one) or [self._reading.value(one, NOWHERE, whole=False)]
        return []

    def _container(self, over: ast.expr) -> Ref:
        """Return the container whose members are one of several that a loop goes over side by side."""
        match self._containers(over):
            case []:
                return self._reading.value(over, NOWHERE, whole=False)
            case [one]:
                return one
        return Ref()

    def _bind_members(self, target: ast.expr, members: Sequence[Ref]) -> None:
        names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        if len(names) == len(members):
            for name, member in zip(names, members, strict=True):
                if isinstance(name, ast.Name) and member.key is not None:
                    self._reading.assign(name, member)
                self._reading.targets.see_outside(name, None, member)
            return
        for name in names:
            self._reading.targets.see_outside(name, None, members[0])

    def _try(self, node: ast.Try | ast.TryStar) -> None:
        start = self._flow.state
        before = None if start is None else set(start)
        if asks_by_failing(node.body, [handler.type for handler in node.handlers]):
            handled = [statement for handler in node.handlers for statement in handler.body]
            self._flow.read(FILES, self._reading.targets.effect([*node.body, *node.orelse, *handled]))
        self.body(node.body)
        self.body(node.orelse)
        ends = [self._flow.state]
        for handler in node.handlers:
            self._flow.state = None if before is None else set(before)
            self.body(handler.body)
            ends.append(self._flow.state)
        self._flow.state = None
        self._flow.merge(*ends)
        self.body(node.finalbody)

    def nested(self, arguments: ast.arguments, body: Sequence[ast.stmt] | ast.expr) -> None:
        """A function defined here, as if it were called here, if at all."""
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names = {argument.arg for argument in (*parameters, arguments.vararg, arguments.kwarg) if argument}
        if not isinstance(body, ast.expr):
            inside = [node for statement in body for node in ast.walk(statement)]
            shared = {name for node in inside if isinstance(node, (ast.Nonlocal, ast.Global)) for name in node.names}
            stored = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            names |= stored - shared
        outer, state, use = dict(self._reading.scope.bound), self._flow.state, self._reading.return_use
        self._reading.scope.bound.update({name: Ref(("temporary", -2, name)) for name in names})
        self._flow.state = None if state is None else set(state)
        self._reading.return_use, returned = None, len(self._reading.returned)
        if isinstance(body, ast.expr):
            self._reading.value(body, None)
        else:
            self.body(body)
        del self._reading.returned[returned:]
        self._reading.return_use = use
        self._reading.scope.bound, self._flow.state = outer, state


def _member(base: Ref, index: int) -> Ref:
    """A member of a container, by its number."""
    held = known(base)
    if isinstance(held, dict):
        keys = list(held)
        return item_of(base, keys[index]) if index < len(keys) else Ref()
    return item_of(base, index) if isinstance(held, (list, tuple, deque)) and index < len(held) else part_of(base)
