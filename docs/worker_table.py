"""The worker's table for PROTOCOL.md: event × state → actions, from `core/worker` and the syntax of its handlers."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from relight.core.worker import actions, orders
from relight.core.worker.states import State
from relight.core.worker.table import TABLE

FOLDER = Path(orders.__file__).parent
RECOVER = "recover"  # what all that interrupts a worker comes to, written down in full once
RECOVERIES = (RECOVER, "leave_step")
SPELT_OUT = ("on_step_left", "leave_step")
ACTIONS = tuple(name for name, kind in vars(actions).items() if isinstance(kind, type) and name != "Action")


def state_rows() -> Iterator[tuple[str, str]]:
    """Yield each state, and what a worker does in it."""
    for state in State:
        yield _name(state), state.value


def event_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield each event, states in which it decides alike, the actions that may follow, and the states after it."""
    for event, by_state in TABLE.items():
        for handler in dict.fromkeys(by_state.values()):
            states = [state for state, other in by_state.items() if other is handler]
            where = "any" if len(states) == len(State) else ", ".join(map(_name, states))
            found = _reached(handler.__name__)
            done = [action for action in ACTIONS if action in found]
            done += [f"*{RECOVER}*"] if RECOVER in found else []
            after = [_name(state) for state in State if f"State.{state.name}" in found]
            yield event.__name__, where, ", ".join(done) or "none", ", ".join(after) or "the same"


def _name(state: State) -> str:
    return state.name.lower().replace("_", " ")


@cache
def _reached(name: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of actions, and states that are set, in a function or constant and in what it uses."""
    node = _definitions().get(name)
    if node is None or name in seen:
        return frozenset()
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Assign) and any(_is_state(target) for target in part.targets):
            states = [s for s in ast.walk(part.value) if isinstance(s, ast.Attribute) and _is_of_state(s)]
            found |= {f"State.{state.attr}" for state in states if not _is_compared(part.value, state)}
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "act":
            found.add(part.attr)
        elif isinstance(part, ast.Name) and part.id in RECOVERIES and name not in SPELT_OUT:
            found.add(RECOVER)
        elif isinstance(part, ast.Name):
            found |= {part.id} & set(ACTIONS)
            found |= _reached(part.id, seen | {name})
    return frozenset(found)


def _is_state(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == "state"


def _is_of_state(part: ast.Attribute) -> bool:
    return isinstance(part.value, ast.Name) and part.value.id == "State"


def _is_compared(value: ast.expr, state: ast.Attribute) -> bool:
    """Return whether a state only decides which other one is set."""
    tests = [part.test for part in ast.walk(value) if isinstance(part, ast.IfExp)]
    return any(state in ast.walk(test) for test in tests)


@cache
def _definitions() -> Mapping[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for path in (FOLDER / name for name in ("orders.py", "recovery.py", "step.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = ast.Module(node.body, [])
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                found[node.target.id] = node.value
    return found
