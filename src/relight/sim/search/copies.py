"""Copies of a controller, and keys by which two of them are compared exactly.

A controller is composed of parts, each with its own data, that refer to each other. A copy has the same parts with
copies of their data. Values that are replaced whole are shared.
"""

from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import fields
from typing import Any

from relight.core.account.doubts import Doubts
from relight.core.account.failure_log import FailureLog
from relight.core.account.job_stats import JobStats
from relight.core.account.recovery_log import Recovery, RecoveryLog
from relight.core.controller import PRODUCTION, Controller
from relight.core.job.breaker import Breaker
from relight.core.membership.backoff import Backoff
from relight.core.membership.members import Members
from relight.core.protocol.position import Position
from relight.core.recovery.attempt import RecoveryAttempt

# What is written down for people does not change decisions, nor do counts of failures that are far below their limits.
_ACCOUNTS = frozenset(
    "settings kinds hosts job_stats tracebacks entered recovery_step standing_order _at_step _alike _starts "
    "_slowest_start_seconds".split()
)
_ACCOUNT = (JobStats, FailureLog, RecoveryLog, Recovery, Doubts)
_KINDS = (Controller, Breaker, *(getattr(PRODUCTION, field.name) for field in fields(PRODUCTION)))


_known_kinds: dict[type, bool] = {}  # since asking each time takes half of the time of a copy


def _is_part(value: object) -> bool:
    kind = type(value)
    if kind not in _known_kinds:
        _known_kinds[kind] = issubclass(kind, _KINDS)
    return _known_kinds[kind]


def parts_of(controller: Controller) -> list[Any]:
    """The controller and its parts: the job, stages and concerns."""
    found: list[Any] = [controller]
    for part in found:
        found += [value for value in vars(part).values() if _is_part(value) and value not in found]
    return found


def copy_controller(controller: Controller) -> Controller:
    """Copy a controller, so that the copy can take other decisions."""
    twin: Controller = _twin(controller, {})
    return twin


Twins = dict[int, Any]  # the copies made so far, by the identity of what was copied


def _twin(part: Any, twins: Twins) -> Any:
    """Copy a part that has no copy yet, and the parts that it refers to, each once."""
    twin = twins[id(part)] = object.__new__(type(part))
    mine = twin.__dict__
    mine.update(part.__dict__)
    for name, value in part.__dict__.items():
        kind = type(value)
        copier = _copiers[kind] if kind in _copiers else _find_copier(kind)
        if copier is _twin and id(value) in twins:  # as of most references between parts: spares a call
            mine[name] = twins[id(value)]
        elif copier is not None:
            mine[name] = copier(value, twins)
    return twin


Copier = Callable[[Any, Twins], Any]
_copiers: dict[type, Copier | None] = {}  # by type; None: its values are never changed, so copies share them


def _find_copier(kind: type) -> Copier | None:
    copier: Copier | None = None
    if issubclass(kind, (*_KINDS, *_ACCOUNT)):
        copier = _twin
    elif issubclass(kind, dict | set | list | RecoveryAttempt):
        copier = _copy_collection
    elif issubclass(kind, Members):
        copier = _copy_members
    elif issubclass(kind, Backoff):
        copier = _copy_value
    _copiers[kind] = copier
    return copier


def _copy_collection(value: Any, _: Twins) -> Any:
    return value.copy()


def _copy_value(value: Any, _: Twins) -> Any:
    return copy(value)


def _copy_members(members: Members, _: Twins) -> Members:
    twin = Members.__new__(Members)
    for name, value in vars(members).items():
        vars(twin)[name] = value.copy() if isinstance(value, dict | set | list) else value
    twin.processes = {}
    for name, process in members.processes.items():
        other = twin.processes[name] = process.__class__.__new__(process.__class__)
        vars(other).update(vars(process))
    return twin


def exact_key(controller: Controller, now: float) -> Hashable:
    """Equal only for controllers that have the same data, as far as decisions depend on it; times from now on."""
    parts = parts_of(controller)
    return (
        tuple([_key(v, now) for part in parts for name, v in vars(part).items() if _counts(name, v)]),
        controller.reserve.patience_seconds,
        len(controller.job_stats.failures.newest),
        bool(controller.job_stats.doubts.found),
    )


def _counts(name: str, value: object) -> bool:
    return name not in _ACCOUNTS and not _is_part(value)


def _key(value: Any, now: float) -> Hashable:
    """A hashable value for a part of the controller's data; times from now on."""
    if isinstance(value, Members):
        processes = [tuple([_key(v, now) for v in vars(process).values()]) for process in value.processes.values()]
        return tuple(processes), tuple(sorted(value.predecessors.items()))
    if isinstance(value, Position):
        return value.step, value.phase, value.version, value.private_versions
    if isinstance(value, dict):
        return tuple(sorted((repr(key), _key(item, now)) for key, item in value.items()))
    if isinstance(value, set):
        return tuple(sorted(map(repr, value)))
    if isinstance(value, RecoveryAttempt):
        reports = [_key(getattr(value, name), now) for name in ("stopped", "restored", "done")]
        suspected = value.suspected_restore, value.suspected_collective
        return value.stop_limit_seconds, value.decision, suspected, tuple(reports)
    if isinstance(value, float):
        return value - now
    if isinstance(value, Backoff):
        return value.relative_to(now)
    other: Hashable = value
    return other
