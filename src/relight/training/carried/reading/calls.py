"""Reads calls of a script: what the receiver, the function's name and the arguments tell of their effect."""

import ast
import functools
import io
from collections.abc import Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from relight.training.carried.code.refs import (
    Callee,
    Place,
    Ref,
    attribute_of,
    callee_of,
    class_of,
    container_behind,
    dispatched,
    has_contents,
    is_generator,
    is_iterator,
    is_of_a_library,
    own_method,
    part_of,
)
from relight.training.carried.code.source import node_of
from relight.training.carried.reading.flow import FILES, NOWHERE, Use
from relight.training.carried.reading.syntax import (
    ASKS_FOR_FILES,
    MUTATORS,
    MUTATORS_OF_FIRST,
    NO_NAME,
    OF_MODULES,
    SAME,
    VIEWS,
    changes_files,
    constant_of,
    is_in_place,
    is_showing,
    known,
    only_keeps_its_parameter,
    union,
)
from relight.training.torch_private.modules import hook_tables_of, parameters_in

_NOT_IN_MEMORY = (io.TextIOWrapper, type(None))  # print(..., file=...) into a log, or on a rank that keeps none

if TYPE_CHECKING:
    from relight.training.carried.reading.reading import Reading


class Calls:
    """Reads calls. Functions of the user's are followed; of those of libraries, the name tells the effect."""

    def __init__(self, reading: "Reading") -> None:
        self._reading = reading
        self._flow = reading.flow

    def call(self, node: ast.Call, use: Use, *, is_statement: bool) -> Ref:
        self._reading.unfreezing.note(node)
        return self._reading.making.note_call(node, self._call(node, use, is_statement=is_statement))

    def _call(self, node: ast.Call, use: Use, *, is_statement: bool) -> Ref:
        function = node.func
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        receiver: Ref | None = None
        if is_showing(function):
            use, is_statement = NOWHERE, False
        inherited = self._reading.functions.inherited(function)
        if isinstance(function, ast.Attribute) and inherited is None:
            receiver, changes = self._receiver(node, function, use, is_statement=is_statement)
            if changes:
                into = self._reading.into_changed(function.value)
                self._flow.mutate(receiver, self._reading.at(node), grows=function.attr in ("append", "extend"))
                for argument in arguments:
                    given = self._reading.value(argument, into if is_statement else union([into, use]))
                    self._reading.making.put_into(into, given, argument)
                return Ref()
        else:
            self._reading.value(
                function, None if is_statement else use
            )  # which function it is decides what comes of it
        # Some method of an object.
        if isinstance(function, ast.Call) and getattr(function.func, "id", "") == "getattr" and function.args:
            self._flow.mutate(self._reading.refer(function.args[0]), self._reading.at(node))  # some method of it
        target = self._reading.refer(function)
        if receiver is not None and isinstance(function, ast.Attribute):
            target = attribute_of(receiver, function.attr, self._reading.is_foreign)
        held, method = container_behind(known(target))
        if receiver is None and method in MUTATORS and has_contents(held):
            self._flow.mutate(self._reading.scope.find(held), self._reading.at(node))
        if isinstance(known(target), nn.Module):
            self._flow.read(target, use)  # what it returns depends on all that it holds
            self._run_hooks(target, node)
        if (functions := dispatched(known(target))) and self._enter_any(functions, receiver, target, node, use):
            return Ref()
        callee = inherited or self._reading.functions.placed(callee_of(target, receiver))
        if callee is not None:
            self._flow.sets_epoch = self._sets_epoch(node, callee)
            result = self._reading.functions.enter(callee, target, node, NOWHERE if is_statement else use)
            self._flow.sets_epoch = False
            if result is not None:
                return result
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in ASKS_FOR_FILES:
            self._flow.read(FILES, use)
        elif changes_files(node, known(receiver) if receiver is not None else None):
            self._flow.change_files(self._reading.at(node))
            with self._flow.for_files():
                return self._call_library(node, name, receiver, use)
        if name == "type" and known(target) is type and len(arguments) == 1:
            return class_of(self._reading.value(arguments[0], use))
        return self._call_library(node, name, receiver, use)

    def _sets_epoch(self, node: ast.Call, callee: Callee) -> bool:
        """Return whether a call gives the number of the epoch to an object that keeps it and does nothing else."""
        match node:
            case ast.Call(func=ast.Attribute(attr="set_epoch"), args=[ast.Name() as given], keywords=[]):
                ref = self._reading.refer(given)
                is_epoch = ref.key in self._reading.epochs or (ref.alias or ref).key in self._reading.epochs
                return is_epoch and only_keeps_its_parameter(node_of(callee.function.__code__))
        return False

    def _enter_any(
        self, functions: Sequence[FunctionType], receiver: Ref | None, target: Ref, node: ast.Call, use: Use
    ) -> bool:
        """Read functions of which the call runs one; return whether any could be read."""
        start, ends = self._flow.state, []
        of_object = receiver if isinstance(known(target), functools.singledispatchmethod) else None
        for function in functions:
            self._flow.state = None if start is None else set(start)
            one = Ref(target.key, function, target.place)
            if self._reading.functions.enter(Callee(function, of_object), one, node, use) is not None:
                ends.append(self._flow.state)
        self._flow.state = None if ends else start
        self._flow.merge(*ends)
        return bool(ends)

    def _receiver(self, node: ast.Call, function: ast.Attribute, use: Use, *, is_statement: bool) -> tuple[Ref, bool]:
        """Read the receiver of a method call; return it, and whether the call changes it."""
        is_named_so = function.attr in MUTATORS
        is_in_place = function.attr[-1] == "_" and function.attr[:1] != "_"
        is_made = isinstance(function.value, (ast.Call, ast.Attribute, ast.Subscript))
        receiver = (
            self._reading.value(function.value, NOWHERE, whole=False)
            if is_made
            else self._reading.refer(function.value)
        )
        changes = (is_named_so or is_in_place) and (has_contents(known(receiver)) or receiver.is_part)
        changes |= is_named_so and is_of_a_library(known(receiver))
        draws = is_generator(known(receiver)) or is_iterator(known(receiver))
        is_own = own_method(known(receiver), function.attr) is not None
        if function.attr == "step" and not is_own:
            self._step(receiver, node)
        self._flow.is_called_alone = is_statement and not is_own
        with self._flow.for_files(changes_files(node, known(receiver))):
            goes_into = NOWHERE if is_statement and (changes or draws) else use
            self._reading.value(function.value, goes_into, whole=not is_own)
        self._flow.is_called_alone = False
        if draws:
            self.draw(receiver, node, use)
        return receiver, changes and not draws

    def _step(self, receiver: Ref, node: ast.Call) -> None:
        owner = known(receiver)
        if isinstance(owner, torch.optim.Optimizer):
            self._run_hooks_of(owner, receiver.place, node)
        if not isinstance(owner, LRScheduler):
            self._flow.step(is_certain=isinstance(owner, (torch.optim.Optimizer, torch.amp.GradScaler)))

    def _call_library(self, node: ast.Call, name: str, receiver: Ref | None, use: Use) -> Ref:
        """A function that is not the user's: its name tells what it does with its arguments."""
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        last = Ref()
        for index, argument in enumerate(arguments):
            last = ref = self._reading.value(argument, use)
            self._reading.functions.pass_on(ref, node, use)
            if is_generator(ref.value) or is_iterator(ref.value):
                self.draw(ref, node, use)
            elif index == 0 and name == "setattr" and len(arguments) > 1:
                self._flow.set_on_tensor(str(constant_of(arguments[1])))
                self._flow.mutate(ref, self._reading.at(node))
            elif index == 0 and name != "next" and (name in MUTATORS_OF_FIRST or is_in_place(name)):
                self._flow.mutate(ref, self._reading.at(node))
        for keyword in node.keywords:
            if keyword.arg in ("out", "file"):
                written = self._reading.refer(keyword.value)
                if not isinstance(known(written), _NOT_IN_MEMORY):
                    self._flow.mutate(written, self._reading.at(node))
        if receiver is not None and name in VIEWS and has_contents(known(receiver)):
            return part_of(receiver)
        if receiver is not None and name in OF_MODULES and isinstance(known(receiver), nn.Module):
            return part_of(receiver)
        if name in SAME and len(arguments) == 1:
            return self._reading.refer(arguments[0]) if not isinstance(arguments[0], ast.Call) else last
        return Ref()

    def _run_hooks(self, target: Ref, node: ast.Call) -> None:
        """Functions of the user's that calling a module runs, or the backward pass of what it returns."""
        for path, module in known(target).named_modules():
            steps = tuple(("attribute", name, "") for name in path.split(".") if name)
            place = (*target.place, *steps) if target.place else None
            self._run_hooks_of(module, place, node)
            for name, parameter in parameters_in(module).items():
                if parameter is not None:
                    self._run_hooks_of(parameter, (*place, ("attribute", name, "")) if place else None, node)

    def _run_hooks_of(self, owner: Any, place: Place | None, node: ast.Call) -> None:
        for table, hooks in hook_tables_of(owner):
            for number, hook in enumerate(list(hooks.values())):
                there = (*place, ("attribute", table, ""), ("member", str(number), "")) if place else None
                call = ast.copy_location(ast.Call(NO_NAME, [], []), node)
                self._reading.functions.pass_on(Ref(("hook", id(hook)), hook, there), call, None)

    def draw(self, ref: Ref, node: ast.AST, use: Use) -> None:
        """A generator or iterator goes on."""
        self._flow.read(ref, use)
        self._flow.mutate(ref, self._reading.at(node))
