"""Reads the controller's table off its code: what it may order on each event in each stage, and the stages after it.

The syntax trees of core/controller.py and core/stages are followed from the handler of an event, with the set of stages
in which the job may be. Conditions on the stage are decided; any other condition may be true or false. So an order
that is listed *may* be given, and one that is not listed never is.
"""

import ast
import inspect
import textwrap
import typing
from collections.abc import Iterable, Iterator, Sequence

from relight.core.controller import Controller, ControllerSettings, Stage
from relight.core.protocol import commands
from relight.sim.search.copies import parts_of

COMMANDS = tuple(kind.__name__ for kind in typing.get_args(commands.Command))
Stages = frozenset[Stage]
NOWHERE: Stages = frozenset()
LIVING = tuple(stage for stage in Stage if stage is not Stage.ENDED)
CONTROLLER = Controller(ControllerSettings(world_size=2))
PARTS = parts_of(CONTROLLER)


class Outcome(typing.NamedTuple):
    """Orders that may be given, and the stages that the job may be in afterwards."""

    orders: frozenset[str]
    stages: Stages


def _function(kind: type, name: str) -> ast.FunctionDef | None:
    """The syntax tree of a method or property; None if a class has none of that name."""
    found = inspect.getattr_static(kind, name, None)
    found = found.fget if isinstance(found, property) else found
    if not inspect.isfunction(found):
        return None
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    assert isinstance(node, ast.FunctionDef)
    return node


class Follower:
    """Follow one method of one part, from the stages in which it is called."""

    def __init__(self, part: object, known: dict[tuple[int, str, Stages], Outcome]) -> None:
        self._known = known
        self._names: dict[str, object] = {"self": part}
        self._orders: set[str] = set()
        self._exits: set[Stage] = set()

    def follow(self, body: Sequence[ast.stmt], stages: Stages) -> Outcome:
        """The outcome of a whole body."""
        after = self._block(body, stages)
        return Outcome(frozenset(self._orders), frozenset(self._exits) | after)

    # --- statements ---------------------------------------------------------------------------------------------
    def _block(self, body: Iterable[ast.stmt], stages: Stages) -> Stages:
        """The stages after a block, as far as it does not return."""
        for statement in body:
            if not stages:
                break
            stages = self._statement(statement, stages)
        return stages

    def _statement(self, node: ast.stmt, stages: Stages) -> Stages:
        match node:
            case ast.If():
                stages = self._value(node.test, stages)
                yes, no = self._split(node.test, stages)
                return self._block(node.body, yes) | self._block(node.orelse, no)
            case ast.For():
                stages = self._value(node.iter, stages)
                return stages | self._block(node.body, stages)
            case ast.Match():
                stages = self._value(node.subject, stages)
                return self._match(node, stages)
            case ast.Return():
                self._exits |= stages if node.value is None else self._value(node.value, stages)
                return NOWHERE
            case ast.Assign():
                stages = self._value(node.value, stages)
                for target in node.targets:
                    stages = self._assign(target, node.value, stages)
                return stages
            case ast.Expr() | ast.AugAssign() | ast.AnnAssign():
                return stages if node.value is None else self._value(node.value, stages)
        return stages

    def _match(self, node: ast.Match, stages: Stages) -> Stages:
        after, left = NOWHERE, stages
        by_stage = isinstance(node.subject, ast.Attribute) and node.subject.attr == "stage"
        for case in node.cases:
            here = left & _stages_in(case.pattern) if by_stage else left
            after |= self._block(case.body, here)
            left = left - here if by_stage else left
        return after | left

    def _assign(self, target: ast.expr, value: ast.expr, stages: Stages) -> Stages:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=True):
                stages = self._assign(one, other, stages)
        elif isinstance(target, ast.Name):
            self._names[target.id] = self._object(value)
        elif isinstance(target, ast.Attribute) and target.attr == "stage":
            return _stages_in(value) or stages
        return stages

    # --- expressions --------------------------------------------------------------------------------------------
    def _value(self, node: ast.AST, stages: Stages) -> Stages:
        """The stages after an expression is evaluated, with the orders that it makes."""
        match node:
            case ast.IfExp():
                stages = self._value(node.test, stages)
                yes, no = self._split(node.test, stages)
                return (self._value(node.body, yes) if yes else yes) | (self._value(node.orelse, no) if no else no)
            case ast.BoolOp():
                after, here = NOWHERE, stages
                for value in node.values:
                    here = self._value(value, here) if here else here
                    yes, no = self._split(value, here)
                    here, left = (yes, no) if isinstance(node.op, ast.And) else (no, yes)
                    after |= left
                return after | here
            case ast.Call():
                return self._call(node, stages)
        for child in ast.iter_child_nodes(node):
            stages = self._value(child, stages)
        return stages

    def _call(self, node: ast.Call, stages: Stages) -> Stages:
        for child in (*node.args, *(keyword.value for keyword in node.keywords)):
            stages = self._value(child, stages)
        if isinstance(node.func, ast.Name) and node.func.id in COMMANDS:
            self._orders.add(node.func.id)
        if isinstance(node.func, ast.Attribute):
            stages = self._value(node.func.value, stages)
            owner = self._object(node.func.value)
            if any(owner is part for part in PARTS):
                outcome = outcome_of(owner, node.func.attr, stages, self._known)
                self._orders |= outcome.orders
                return outcome.stages
        return stages

    def _object(self, node: ast.expr) -> object:
        """The part that an expression names; None for anything else."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            found = vars(owner).get(node.attr) if (owner := self._object(node.value)) is not None else None
            return next((part for part in PARTS if part is found), None)
        return None

    # --- conditions on the stage --------------------------------------------------------------------------------
    def _split(self, test: ast.expr, stages: Stages) -> tuple[Stages, Stages]:
        """The stages in which a condition may be true, and those in which it may be false."""
        answers = {stage: self._decide(test, stage) for stage in stages}
        yes = frozenset(stage for stage, answer in answers.items() if answer is not False)
        return yes, frozenset(stage for stage, answer in answers.items() if answer is not True)

    def _decide(self, test: ast.expr, stage: Stage) -> bool | None:
        """Return whether a condition holds in a stage; None if that depends on more than the stage."""
        match test:
            case ast.BoolOp():
                answers = [self._decide(value, stage) for value in test.values]
                decisive = isinstance(test.op, ast.Or)
                if decisive in answers:
                    return decisive
                return None if None in answers else not decisive
            case ast.UnaryOp(op=ast.Not()):
                answer = self._decide(test.operand, stage)
                return None if answer is None else not answer
            case ast.Compare(left=ast.Attribute(attr="stage"), ops=[op], comparators=[other]):
                is_one = stage in _stages_in(other)
                return not is_one if isinstance(op, ast.IsNot | ast.NotIn) else is_one
            case ast.Name() if isinstance(self._names.get(test.id), ast.expr):
                return self._decide(typing.cast("ast.expr", self._names[test.id]), stage)
            case ast.Attribute() if (owner := self._object(test.value)) is not None:
                node = _function(type(owner), test.attr)
                last = node.body[-1] if node is not None else None
                if isinstance(last, ast.Return) and last.value is not None:
                    return Follower(owner, self._known)._decide(last.value, stage)
        return None


def _stages_in(node: ast.AST) -> Stages:
    """The stages that an expression or a pattern names."""
    return frozenset(
        Stage[n.attr]
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "Stage"
    )


def outcome_of(part: object, method: str, stages: Stages, known: dict[tuple[int, str, Stages], Outcome]) -> Outcome:
    """The outcome of calling a method of a part in one of these stages."""
    key = id(part), method, stages
    if key not in known:
        known[key] = Outcome(frozenset(), stages)  # of a call inside itself
        node = _function(type(part), method)
        if node is not None:
            known[key] = Follower(part, known).follow(node.body, stages)
    return known[key]


# --- the table ----------------------------------------------------------------------------------------------------
def _cases(method: str) -> Iterator[tuple[ast.pattern, list[ast.stmt]]]:
    node = _function(Controller, method)
    assert node is not None
    for statement in ast.walk(node):
        if isinstance(statement, ast.match_case):
            yield statement.pattern, statement.body


def events() -> dict[str, list[ast.stmt]]:
    """Each event by name, and the call of its handler."""
    return {
        part.cls.attr: body
        for pattern, body in _cases("_on_event")
        for part in ast.walk(pattern)
        if isinstance(part, ast.MatchClass) and isinstance(part.cls, ast.Attribute)
    }


def deadlines() -> dict[Stage, str]:
    """The handler of each stage's deadline, by name; an empty string if a stage has none."""
    found: dict[Stage, str] = {}
    for pattern, body in _cases("_on_deadline"):
        called = [node.func for part in body for node in ast.walk(part) if isinstance(node, ast.Call)]
        names = [function.attr for function in called if isinstance(function, ast.Attribute)]
        found.update(dict.fromkeys(_stages_in(pattern), names[0] if names else ""))
    return found


def event_rows() -> Iterator[tuple[str, str, str, str]]:
    """Event, stages, orders and next stages; stages with the same outcome share a row."""
    for name, body in events().items():
        yield from _rows(f"**{name}**", [(stage, _outcome(body, stage)) for stage in LIVING])
    expire = [(stage, outcome_of(CONTROLLER, "expire", frozenset({stage}), {})) for stage in LIVING]
    yield from _rows("*its deadline passes*", expire)


def _outcome(body: Sequence[ast.stmt], stage: Stage) -> Outcome:
    return Follower(CONTROLLER, {}).follow(body, frozenset({stage}))


def _rows(name: str, outcomes: Iterable[tuple[Stage, Outcome]]) -> Iterator[tuple[str, str, str, str]]:
    alike: dict[tuple[frozenset[str], Stages], list[Stage]] = {}
    for stage, outcome in outcomes:
        after = outcome.stages - {stage}
        if outcome.orders or after:
            alike.setdefault((outcome.orders, after), []).append(stage)
    if not alike:
        yield name, "any", "nothing", ""
    for (orders, after), stages in alike.items():
        where = "any" if len(stages) == len(LIVING) else ", ".join(stages)
        ordered = ", ".join(order for order in COMMANDS if order in orders) or "nothing"
        yield name, where, ordered, ", ".join(stage for stage in Stage if stage in after)
        name = ""
