"""Bugs planted into the rule, the controller and the worker: the simulation must find each, and soon.

Each is a variant that somebody has published, or that loses in docs/PROTOCOL.md, or that this project once had.
`within` is a promise about the simulation: some of the first so many random schedules breaks an invariant. Seen with
`pytest -s`: by which seed it was found, and by which invariant.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import pytest

import relight.core.controller as controller_module
from relight.core.commands import Command
from relight.core.controller import Controller, Stage
from relight.core.decision import Decision, Halt, decide
from relight.core.events import Stopped
from relight.core.members import Process
from relight.core.position import Phase
from tests.core.simulated_clock import Violation
from tests.core.simulated_group import Operation
from tests.core.simulated_job import SimulatedJob
from tests.core.simulated_schedule import Regression, Schedule, random_schedule, recorded_regressions
from tests.core.simulated_worker import Main, Worker

Private = Mapping[int, Collection[int]]
Rule = Callable[[Sequence[Stopped], Private, int], Decision | Halt]


# --- other rules --------------------------------------------------------------------------------------------------
def _decision(reports: Sequence[Stopped], world_size: int, target: int, targets: Collection[int] = ()) -> Decision:
    intact = [r for r in reports if not r.blank and not r.torn]
    sources = tuple(sorted(r.rank for r in intact if r.rank not in targets))
    missing = set(range(world_size)) - {r.rank for r in intact}
    return Decision(
        target=target,
        direction="planted",
        reason="a planted bug says so",
        sources=sources,
        finishers=tuple(r.rank for r in intact if r.version < target),
        targets=tuple(sorted(missing | set(targets))),
    )


def _versions(reports: Sequence[Stopped]) -> list[int]:
    return [r.version for r in reports if not r.blank and not r.torn]


def newest_of_the_survivors(reports: Sequence[Stopped], private: Private, world_size: int) -> Decision | Halt:
    """A7: whoever is behind is restored from whoever is ahead. A version that only a dead rank finished is lost."""
    if not _versions(reports):
        return decide(reports, private, world_size)
    newest = max(_versions(reports))
    behind = [r.rank for r in reports if not r.blank and r.version < newest]
    return _decision(reports, world_size, newest, behind)


def forward_if_any_is_prepared(reports: Sequence[Stopped], private: Private, world_size: int) -> Decision | Halt:
    if not _versions(reports):
        return decide(reports, private, world_size)
    base = min(_versions(reports))
    reachable = any(r.version > base or r.prepared == base for r in reports if not r.blank)
    return _decision(reports, world_size, base + reachable)


def private_state_is_forgotten(reports: Sequence[Stopped], private: Private, world_size: int) -> Decision | Halt:
    return decide(reports, {}, world_size)


def one_source_and_the_rest_copies(reports: Sequence[Stopped], private: Private, world_size: int) -> Decision | Halt:
    """A8: restore everyone from one, whether he needs it or not."""
    decision = decide(reports, private, world_size)
    if isinstance(decision, Halt):
        return decision
    source = decision.sources[0]
    others = tuple(rank for rank in range(world_size) if rank != source)
    return msgspec.structs.replace(decision, sources=(source,), targets=others)


@contextmanager
def _rule(rule: Rule) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller_module, "decide", rule)
        yield


# --- other controllers --------------------------------------------------------------------------------------------
class DecidesFromTheDeadRanksTag(Controller):
    """A1, the published rule: in or after the optimizer, forward; before it, back. The dead rank's page decides."""

    def _advance(self, now: float) -> list[Command]:
        with _rule(self._by_tag):
            return super()._advance(now)

    def _by_tag(self, reports: Sequence[Stopped], private: Private, world_size: int) -> Decision | Halt:
        tags = [self.members.processes[names[-1]].final_position for names in self.members.predecessors.values()]
        if not tags or not _versions(reports):
            return decide(reports, private, world_size)
        base = min(_versions(reports))
        past = any(tag.phase is Phase.OPTIMIZER or tag.version > base for tag in tags)
        return _decision(reports, world_size, base + past)


class DecidesBeforeAllStandStill(Controller):
    """A2: takes the newest reports for the missing ones."""

    def _advance(self, now: float) -> list[Command]:
        known = [report for report in self._stopped.values() if not report.blank]
        if self.stage is Stage.STOPPING and known:
            for rank, process in self.members.by_rank().items():
                guess = msgspec.structs.replace(known[-1], process=process.name, rank=rank, blank=process.replacement)
                self._stopped.setdefault(process.name, guess)
        return super()._advance(now)


class UsesAGenerationTwice(Controller):
    """D1: the number goes up only when the number of failures is odd."""

    def _open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        if self.failures % 2 == 0 and self.stage is not Stage.STARTING:
            self.generation -= 1
        return super()._open_generation(now, stop_limit_seconds)


class BelievesOldReports(Controller):
    """A report of an older generation, as a restarted agent may repeat it, counts like a new one."""

    def _on_stopped(self, event: Stopped, now: float) -> list[Command]:
        return super()._on_stopped(msgspec.structs.replace(event, generation=self.generation), now)


class GivesARankAwayTooSoon(Controller):
    """A process that was declared failed is not awaited: it may still write, and its page may still change."""

    def _advance(self, now: float) -> list[Command]:
        dying = self.members.dying
        self.members.dying = list  # type: ignore[method-assign]
        try:
            return super()._advance(now)
        finally:
            self.members.dying = dying  # type: ignore[method-assign]


class ForgetsRestoredReplacements(Controller):
    """Once ours: a replacement counted as a replica from Resume on, and not from the end of its copy."""

    def _open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        for process in self.members.by_rank().values():
            process.may_hold_state = not process.replacement
        return super()._open_generation(now, stop_limit_seconds)


class IgnoresFrozenProcessesAtTheEnd(Controller):
    """Once ours: nobody was declared failed once training was done, and nothing else ended the wait."""

    def _on_suspected(self, event: object, now: float) -> list[Command]:
        if self.stage is Stage.FINISHING:
            return []
        return super()._on_suspected(event, now)  # type: ignore[arg-type]


class BlamesEveryoneForASlowRestore(Controller):
    """Once ours: at the deadline everyone who was not restored had failed, and that was everyone."""

    def _on_restore_timeout(self, now: float) -> list[Command]:
        if self._suspected_restore is not None:
            return super()._on_restore_timeout(now)
        late: list[Process] = [p for p in self.members.by_rank().values() if p.name not in self._restored]
        return self._fail_late(late, "did not finish restoring", now)


class ComparesTheStopDeadlineInAnotherWay(Controller):
    """Once ours: `asked_at + limit` is past, `now - asked_at >= limit` is not. The deadline passed for ever."""

    def _on_stop_timeout(self, now: float) -> list[Command]:
        limit = self._stop_limit_seconds
        waiting = [p for p in self.members.by_rank().values() if p.name not in self._stopped]
        if waiting and not any(now - p.asked_at >= limit for p in waiting):
            self._deadline = min(p.asked_at + limit for p in waiting)
            return self._fill_vacancies(now)
        return super()._on_stop_timeout(now)


# --- other workers ------------------------------------------------------------------------------------------------
class DoesNotClaimPrivateState(Worker):
    """Once ours: a replacement that died in its first step left a page that named no private state."""

    claims_private: ClassVar[bool] = False


class StopsInsideTheWrite(Worker):
    """A12: Stop interrupts the optimizer, and every survivor is torn."""

    finishes_writes: ClassVar[bool] = False


class HasNoBarrier(Worker):
    """A20: nothing between the gradient's all-reduce and the write."""

    def _collective(self, kind: str, contribution: str) -> Main[Operation | None]:
        if kind == "BARRIER":
            yield self._pause("BARRIER")
            return Operation(kind)
        return (yield from super()._collective(kind, contribution))


# --- the test -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plant:
    """A variant, and the number of random schedules within which it must be found."""

    name: str
    within: int
    rule: Rule = decide
    controller: type[Controller] = Controller
    worker: type[Worker] = Worker


PLANTS = [
    Plant("decides from the dead rank's tag", 100, controller=DecidesFromTheDeadRanksTag),
    Plant("target is the newest version of the survivors", 200, rule=newest_of_the_survivors),
    Plant("forward if any is prepared", 100, rule=forward_if_any_is_prepared),
    Plant("private versions are ignored", 200, rule=private_state_is_forgotten),
    Plant("decides before all stand still", 50, controller=DecidesBeforeAllStandStill),
    Plant("uses a generation twice", 50, controller=UsesAGenerationTwice),
    Plant("copies over intact ranks", 50, rule=one_source_and_the_rest_copies),
    Plant("believes reports of an old generation", 5000, controller=BelievesOldReports),
    Plant("gives a rank away too soon", 300, controller=GivesARankAwayTooSoon),
    Plant("forgets restored replacements", 3000, controller=ForgetsRestoredReplacements),
    Plant("ignores frozen processes at the end", 600, controller=IgnoresFrozenProcessesAtTheEnd),
    Plant("blames everyone for a slow restore", 6000, controller=BlamesEveryoneForASlowRestore),
    Plant("compares the stop deadline in another way", 6000, controller=ComparesTheStopDeadlineInAnotherWay),
    Plant("does not claim private state", 200, worker=DoesNotClaimPrivateState),
    Plant("Stop interrupts the write", 200, worker=StopsInsideTheWrite),
    Plant("no barrier", 50, worker=HasNoBarrier),
]


def break_with(plant: Plant, schedule: Schedule) -> str:
    """The invariant that the variant breaks in this schedule, or an empty string."""
    with _rule(plant.rule):
        try:
            SimulatedJob(schedule, plant.controller, plant.worker).run()
        except Violation as violation:
            return str(violation).partition("\n")[0]
    return ""


def hunt(plant: Plant, first: int = 0, limit: int | None = None) -> tuple[int, str] | None:
    """The number of schedules it took, and the invariant that broke."""
    for count in range(1, (limit or plant.within) + 1):
        violation = break_with(plant, random_schedule(first + count - 1))
        if violation:
            return count, violation
    return None


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name.replace(" ", "-"))
def test_the_simulation_finds(plant: Plant) -> None:
    found = hunt(plant)
    assert found is not None, f"{plant.name}: not found by {plant.within} random schedules"
    count, violation = found
    print(f"{plant.name}: found by schedule {count} of {plant.within}: {violation}")


@pytest.mark.parametrize(("name", "regression"), recorded_regressions().items())
def test_a_recorded_schedule_still_shows_its_bug(name: str, regression: Regression) -> None:
    """Otherwise the simulation has changed, and `regressions/` guards nothing any more: record it anew."""
    (plant,) = [plant for plant in PLANTS if plant.name == regression.planted]
    assert break_with(plant, regression.schedule), f"{name} shows nothing"
