"""The reading of an iteration: where it is in the script's code, and the parts that read each kind of syntax."""

import ast
from collections.abc import Callable, Sequence
from typing import Any

from relight.training.carried.code.refs import Key, Ref
from relight.training.carried.code.scope import Scope
from relight.training.carried.reading.calls import Calls
from relight.training.carried.reading.expressions import Expressions
from relight.training.carried.reading.flow import Flow, State, Use
from relight.training.carried.reading.functions import Functions
from relight.training.carried.reading.making import Making
from relight.training.carried.reading.statements import Statements
from relight.training.carried.reading.targets import Targets
from relight.training.carried.reading.unfreezing import Unfreezing


class Reading:
    """Reads statements of a script in the order in which they run, into a `Flow`."""

    def __init__(
        self,
        flow: Flow,
        frames: Sequence[Scope],
        is_foreign: Callable[[Any], bool],
        enters: Callable[[ast.With | ast.AsyncWith], bool],
    ) -> None:
        """`enters`: whether a statement of the loop is `with step`."""
        self.flow = flow
        self.enters = enters
        self.frames = frames
        self.is_foreign = is_foreign
        self.epochs: set[Key] = set()  # variables that stand for the number of the epoch
        for scope in frames:
            scope.frames = frames
        # --- of the function that is read
        self.scope = frames[0]
        self.returned: list[State] = []
        self.return_use: Use = None
        self.results: list[Ref] = []
        # --- the parts
        self.expressions = Expressions(self)
        self.calls = Calls(self)
        self.making = Making(self)
        self.unfreezing = Unfreezing(self)
        self.functions = Functions(self)
        self.statements = Statements(self)
        self.targets = Targets(self)

    def read(self, scope: Scope, statements: Sequence[ast.stmt], *, returns: bool) -> None:
        """Read statements of one of the loop's frames. `returns`: what follows is run after a `return` too."""
        self.scope = scope
        self.statements.body(statements)
        if returns:
            self.flow.merge(*self.returned)
        self.returned.clear()

    def at(self, node: ast.AST) -> tuple[str, int]:
        """The file and line of a piece of code."""
        return self.scope.code.co_filename, getattr(node, "lineno", 0)

    # --- what the parts ask of each other most ----------------------------------------------------------------------
    def value(self, node: ast.expr, use: Use, *, whole: bool = True) -> Ref:
        return self.expressions.value(node, use, whole=whole)

    def refer(self, node: ast.expr) -> Ref:
        return self.expressions.refer(node)

    def assign(self, target: ast.expr, value: Ref) -> None:
        self.targets.assign(target, value)

    def into(self, target: ast.expr) -> Use:
        return self.targets.into(target)

    def into_changed(self, target: ast.expr) -> Use:
        return self.targets.into_changed(target)
