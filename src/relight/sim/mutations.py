"""Bugs planted into the rule, the controller, the detector and the worker: the simulation must find each.

Each is a variant that somebody has published, that loses in docs/PROTOCOL.md, that this project once had, or that is
easily written. Nothing in production code knows of them: they replace a function or override a method. For those in
the worker, it is the model of the worker that is changed.
"""

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from relight.core import events as ev
from relight.core.commands import Command, Release, Restore, Source, Stop, WorkerCommand
from relight.core.controller import Controller, Stage
from relight.core.decision import Decision, Halt, decide
from relight.core.detector import STALE_SECONDS, Detector, DetectorSettings
from relight.core.fault import Action
from relight.core.gathering import HOLD_SECONDS
from relight.core.members import Process
from relight.core.position import IN_STEP, Phase
from relight.sim.contents import Violation
from relight.sim.lower import Lower
from relight.sim.schedule import Schedule, random_schedule
from relight.sim.timed import Parts, SimulatedJob
from relight.sim.worker import Worker

Private = Mapping[int, Collection[int]]
Rule = Callable[[Sequence[ev.Stopped], Private, int], Decision | Halt]


# --- other rules --------------------------------------------------------------------------------------------------
def _decision(reports: Sequence[ev.Stopped], world_size: int, target: int, targets: Collection[int] = ()) -> Decision:
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


def _versions(reports: Sequence[ev.Stopped]) -> list[int]:
    return [r.version for r in reports if not r.blank and not r.torn]


def newest_of_the_survivors(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """A7: whoever is behind is restored from whoever is ahead. A version that only a dead rank finished is lost."""
    if not _versions(reports):
        return decide(reports, private, world_size)
    newest = max(_versions(reports))
    behind = [r.rank for r in reports if not r.blank and r.version < newest]
    return _decision(reports, world_size, newest, behind)


def forward_if_any_is_prepared(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """One complete gradient is held to prove that all are complete."""
    if not _versions(reports):
        return decide(reports, private, world_size)
    base = min(_versions(reports))
    reachable = any(r.version > base or r.prepared == base for r in reports if not r.blank)
    return _decision(reports, world_size, base + reachable)


def forward_if_most_are_prepared(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """A majority decides, as in so many protocols."""
    if not _versions(reports):
        return decide(reports, private, world_size)
    base = min(_versions(reports))
    ready = sum(r.version > base or r.prepared == base for r in reports if not r.blank)
    return _decision(reports, world_size, base + (2 * ready > world_size))


def always_back(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """The step in flight is always repeated, also where somebody had finished it."""
    if not _versions(reports):
        return decide(reports, private, world_size)
    return _decision(reports, world_size, min(_versions(reports)))


def prepared_is_not_asked_for(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """A5: the barrier is there, but the decision looks at versions only."""
    return decide([msgspec.structs.replace(r, prepared=-1) for r in reports], private, world_size)


def private_state_is_forgotten(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """The dead rank's private state is taken to be there."""
    return decide(reports, {rank: () for rank in private if rank < 0}, world_size)


def one_source_and_the_rest_copies(reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
    """A8: restore everyone from one, whether he needs it or not."""
    decision = decide(reports, private, world_size)
    if isinstance(decision, Halt):
        return decision
    source = decision.sources[0]
    others = tuple(rank for rank in range(world_size) if rank != source)
    return msgspec.structs.replace(decision, sources=(source,), targets=others)


@contextmanager
def _replaced(name: str, by: Callable[..., object]) -> Iterator[None]:
    """Another function of that name, where the controller decides."""
    module = importlib.import_module("relight.core.stages.stopping")
    before = vars(module)[name]
    vars(module)[name] = by
    try:
        yield
    finally:
        vars(module)[name] = before


def _rule(rule: Rule) -> AbstractContextManager[None]:
    return _replaced("decide", rule)


# --- other controllers --------------------------------------------------------------------------------------------
class DecidesFromTheDeadRanksTag(Controller):
    """A1, the published rule: in or after the optimizer, forward; before it, back. The dead rank's page decides."""

    def _advance(self, now: float) -> list[Command]:
        with _rule(self._by_tag):
            return super()._advance(now)

    def _by_tag(self, reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
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


class DecidesFromStalePositions(Controller):
    """Reports from the generation before are good enough: where a rank stood, it stands."""

    def _open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        before = dict(self._stopped)
        out = super()._open_generation(now, stop_limit_seconds)
        if self.stage is Stage.STOPPING:
            self._stopped.update(before)
        return out


class UsesAGenerationTwice(Controller):
    """D1: the number goes up only when the number of failures is odd."""

    def _open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        if self.failures % 2 == 0 and self.stage is not Stage.STARTING:
            self.generation -= 1
        return super()._open_generation(now, stop_limit_seconds)


class BelievesOldReports(Controller):
    """A report of an older generation, as a restarted agent may repeat it, counts like a new one."""

    def _on_stopped(self, event: ev.Stopped, now: float) -> list[Command]:
        return super()._on_stopped(msgspec.structs.replace(event, generation=self.generation), now)


class BelievesOldRestores(Controller):
    """The same of Restored."""

    def _on_restored(self, event: ev.Restored, now: float) -> list[Command]:
        return super()._on_restored(msgspec.structs.replace(event, generation=self.generation), now)


class BelievesOldEnds(Controller):
    """The same of TrainingDone: a rank that was done, and had to go back, counts as done."""

    def _on_done(self, event: ev.TrainingDone, now: float) -> list[Command]:
        return super()._on_done(msgspec.structs.replace(event, generation=self.generation), now)

    def _open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        before = dict(self._done)
        out = super()._open_generation(now, stop_limit_seconds)
        self._done.update(before)
        return out


class ResumesWithoutTheLast(Controller):
    """The last rank will be restored soon enough."""

    def _on_restored(self, event: ev.Restored, now: float) -> list[Command]:
        out = super()._on_restored(event, now)
        missing = [p for p in self.members.by_rank().values() if p.name not in self._restored]
        if self.stage is Stage.RESTORING and len(missing) == 1 and self.settings.world_size > 2:
            process = missing[0]
            guess = msgspec.structs.replace(event, process=process.name, rank=process.rank)
            return [*out, *super()._on_restored(guess, now)]
        return out


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


class ForgetsThePredecessors(Controller):
    """Only the last holder of a rank is asked for its private state; it may never have got so far."""

    def _open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        kept = {rank: names[-1:] for rank, names in self.members.predecessors.items()}
        self.members.predecessors.update(kept)
        return super()._open_generation(now, stop_limit_seconds)


class IgnoresFrozenProcessesAtTheEnd(Controller):
    """Once ours: nobody was declared failed once training was done, and nothing else ended the wait."""

    def _on_suspected(self, event: ev.ProcessSuspected, now: float) -> list[Command]:
        if self.stage is Stage.FINISHING:
            return []
        return super()._on_suspected(event, now)


class IgnoresBrokenCollectives(Controller):
    """A collective that breaks is taken for the echo of a death, also where none follows."""

    def _on_collective_failed(self, event: ev.CollectiveFailed, now: float) -> list[Command]:  # noqa: ARG002
        return []


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


class SaysNothingAgain(Controller):
    """Once ours: what an agent had not passed on when it died was lost, and waited for until a deadline."""

    def _repeat_orders(self) -> list[Command]:
        return []


class TakesUnknownEndsForAlike(Controller):
    """Once ours: two processes that ended unseen had "failed twice in the same place"."""

    def _on_exited(self, event: ev.ProcessExited, now: float) -> list[Command]:
        known = event if event.exit_status is not None else msgspec.structs.replace(event, exit_status=999)
        return super()._on_exited(known, now)


class WaitsForTheMemoryOfTheDead(Controller):
    """A failed process that is seen dying is not awaited any more, and neither is its page read again: but before."""

    def _on_dying(self, event: ev.ProcessDying, now: float) -> list[Command]:
        position = msgspec.structs.replace(event.position, private_versions=(-1, -1))
        return super()._on_dying(msgspec.structs.replace(event, position=position), now)


class Oversleeps(Controller):
    """Once ours: a controller that had slept past a deadline killed who had answered while it slept."""

    def expire(self, now: float) -> tuple[Command, ...]:
        self._extended = self._deadline
        return super().expire(now)


class ReusesAGenerationAfterItsRestart(Controller):
    """D5 without a durable counter: the successor opens a generation under the number of the last one."""

    def _on_controller_restarted(self, now: float) -> list[Command]:
        if self.stage in (Stage.STOPPING, Stage.RESTORING):
            self.generation -= 1
        return super()._on_controller_restarted(now)


class SaysNothingAfterItsRestart(Controller):
    """The successor waits for what the dead controller had ordered, whether it was sent or not."""

    def _on_controller_restarted(self, now: float) -> list[Command]:
        super()._on_controller_restarted(now)
        return []


class TakesAnotherAgentForTheSame(Controller):
    """Once ours: if agent and controller died together, the successor did not know that the agent was another one."""

    def _on_agent_joined(self, event: ev.AgentJoined, now: float) -> list[Command]:
        if event.agent in self.hosts and self.ledger.controller_restarts:
            return []
        return super()._on_agent_joined(event, now)


class TrustsThePagesOfALostAgent(Controller):
    """Once ours: a dead process's private state was still asked for when its agent, or its host, had died as well."""

    def _forget_pages(self, agent: str) -> None:
        pass


class WaitsForTheLostAtTheEnd(Controller):
    """Once ours: if the last processes of a finished job were a lost host's, the job did not end."""

    def _on_agent_lost(self, event: ev.AgentLost, now: float) -> list[Command]:
        out = super()._on_agent_lost(event, now)
        if self.ended is not None and not self.ended.error:
            self.stage, self.ended = Stage.FINISHING, None
            return out[:-1]
        return out


class PlacesOnALostHost(Controller):
    """A host that is lost keeps its place on the list of those with room."""

    def _on_agent_lost(self, event: ev.AgentLost, now: float) -> list[Command]:
        remove = self.hosts.remove
        self.hosts.remove = str  # type: ignore[method-assign,assignment]
        try:
            return super()._on_agent_lost(event, now)
        finally:
            self.hosts.remove = remove  # type: ignore[method-assign]


class CopiesFromZombies(Controller):
    """Who held a rank on a host that is lost lives on there, perhaps, and counts as a source."""

    def _advance(self, now: float) -> list[Command]:
        out = super()._advance(now)
        return [self._with_zombies(command) if isinstance(command, Restore) else command for command in out]

    def _with_zombies(self, restore: Restore) -> Restore:
        processes = self.members.processes
        holders = [(rank, names[-1]) for rank, names in self.members.predecessors.items()]
        lost = [(rank, name) for rank, name in holders if processes[name].agent not in self.hosts]
        zombies = tuple(Source(rank=rank, address=name) for rank, name in lost)
        return msgspec.structs.replace(restore, sources=(*zombies, *restore.sources))


class DerivesWhateverIsLost(Controller):
    """Private state that nobody holds is taken to follow from rank and step, also where it does not."""

    def _on_stopped(self, event: ev.Stopped, now: float) -> list[Command]:
        return super()._on_stopped(msgspec.structs.replace(event, derivable=True), now)


class WaitsForALostHost(Controller):
    """The ranks of a lost host are asked to stop like all others: only the last deadline takes them out."""

    def _on_agent_lost(self, event: ev.AgentLost, now: float) -> list[Command]:
        if self.stage is not Stage.TRAINING:
            return super()._on_agent_lost(event, now)
        self.hosts.remove(event.agent)
        self.ledger.failure(None, "host lost", event.evidence, None, 0, self.generation, now)
        return self._fail([], -1, None, now)


class ForgetsTheParts(Controller):
    """A divided state is decided upon as if every rank held all of it."""

    def _lost_without(self, process: Process | None = None) -> bool:
        return not any(p.may_hold_state and p is not process for p in self.members.by_rank().values())

    def _advance(self, now: float) -> list[Command]:
        with _replaced("require_every_part", lambda decision, shards: decision):  # noqa: ARG005
            return super()._advance(now)


# --- other detectors ----------------------------------------------------------------------------------------------
class BlamesWhoStopsLater(Detector):
    """Once ours: a survivor that had long waited for a hung rank was blamed if another one stopped sooner."""

    def _update(self, sample: object, now: float) -> None:
        super()._update(sample, now)  # type: ignore[arg-type]
        for watch in self._watched.values():
            watch.before_ns = 0


class TakesFinishingForTraining(Detector):
    """Once ours: a rank that finished its step by itself was taken for a sign that all had been told to go on."""

    def _peers_train(self, watch: object, ranks: Mapping[int, object]) -> bool:
        if super()._peers_train(watch, ranks):  # type: ignore[arg-type]
            return True
        mine = watch.position  # type: ignore[attr-defined]
        return any(
            peer.position.phase in IN_STEP  # type: ignore[attr-defined]
            and peer.position.generation == mine.generation  # type: ignore[attr-defined]
            and peer.position.stamp_ns > mine.stamp_ns  # type: ignore[attr-defined]
            for peer in ranks.values()
        )


class DoesNotCountTheDone(Detector):
    """Once ours: a rank that hung just after Resume was waited for for ever if the others were done with training."""

    def _peers_train(self, watch: object, ranks: Mapping[int, object]) -> bool:
        working = {rank: peer for rank, peer in ranks.items() if peer.position.phase is not Phase.DONE}  # type: ignore[attr-defined]
        return super()._peers_train(watch, working)  # type: ignore[arg-type]


class ForgetsThoseWhoAreAllParked(Detector):
    """Once ours: if all ranks hung just after Resume, nobody was behind anybody, and nothing happened any more."""

    def _parked(self, ranks: Mapping[int, object]) -> list[ev.Event]:  # noqa: ARG002
        return []


class BlamesTheBereft(Detector):
    """Once ours: when a host was given up, a rank that had long waited for it was blamed unless it stopped at once."""

    def _excuse_the_bereft(self, members: frozenset[str], ranks: Mapping[int, object], now: float) -> None:
        pass


class ComparesWithWhoIsOutOfSight(Detector):
    """Once ours: if hangs were noticed in 10 s or less, a survivor was blamed for waiting for a lost host."""

    def __init__(self, settings: DetectorSettings) -> None:
        super().__init__(settings)
        self._stale_seconds = STALE_SECONDS

    def expect(self, sample_seconds: float) -> None:
        super().expect(sample_seconds)
        self._stale_seconds = STALE_SECONDS + 2 * sample_seconds


class ComparesThoughSeldomHeard(Detector):
    """Once ours: with many agents, each heard seldom, a survivor was blamed for waiting for a lost host."""

    def expect(self, sample_seconds: float) -> None:
        super().expect(sample_seconds)
        self._hang_seconds = self._settings.hang_timeout_seconds
        self._stale_seconds = self._hang_seconds / 2 + 2 * sample_seconds


class TakesSlowSamplingForBlindness(Detector):
    """With many agents each is heard seldom: then everybody is out of sight, and no hang is ever noticed."""

    def expect(self, sample_seconds: float) -> None:
        pass


class ForgetsThatItWentDown(Controller):
    """A recovery that goes back below what replicas hold begins again, and those who are not back yet count."""

    def _descend(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        out = super()._descend(reason, reports, now)
        self._fallen_to = -1
        return out


class TakesTheLivingForSnapshots(Controller):
    """Once ours: who had gone back already was named as a source of its snapshot, and had none."""

    def _advance(self, now: float) -> list[Command]:
        with _replaced("has_gone_back", lambda *_: False):
            return super()._advance(now)

    def _descend(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        stood = [
            msgspec.structs.replace(r, snapshots=(*r.snapshots, ev.Snapshot(rank=r.rank, version=r.version)))
            if r.version == self._fallen_to and not r.blank and not r.torn
            else r
            for r in reports
        ]
        return super()._descend(reason, stood, now)


class KeepsToTheBuddies(Controller):
    """Once ours: if buddy memory was lost in the middle of going back to it, a newer checkpoint did not count."""

    def _descend(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        if self._fallen_to >= 0:
            reports = [
                msgspec.structs.replace(r, checkpoints=tuple(v for v in r.checkpoints if v <= self._fallen_to))
                for r in reports
            ]
        return super()._descend(reason, reports, now)


# --- other workers ------------------------------------------------------------------------------------------------
class DoesNotClaimPrivateState(Worker):
    """Once ours: a replacement that died in its first step left a page that named no private state."""

    claims_private: ClassVar[bool] = False


class KeepsPrivateStateTooLate(Worker):
    """Behind the barrier: who dies between the two leaves peers that are ahead of its private state."""

    keeps_private_before_barrier: ClassVar[bool] = False


class StopsInsideTheWrite(Worker):
    """A12: Stop interrupts the optimizer, and every survivor is torn."""

    finishes_writes: ClassVar[bool] = False


class HasNoBarrier(Worker):
    """A20: nothing between the gradient's all-reduce and the write."""

    has_barrier: ClassVar[bool] = False


class RestoresInPlace(Worker):
    """A copy counts as a replica from its first byte on."""

    restores_in_place: ClassVar[bool] = True


class PublishesEarly(Worker):
    """Engines answer with a version as soon as rank 0 has its gradient: one step early."""

    confirms_early: ClassVar[bool] = True


class PublishesItsOwnStep(Worker):
    """Engines answer with a version as soon as rank 0 has finished it, while others may still write."""

    def _publish(self) -> None:
        super()._publish()
        self._confirm(self.state.version)


class AnswersStopAtOnce(Worker):
    """The thread that hears Stop answers it, and the main thread is still inside the write."""

    def receive(self, message: WorkerCommand) -> None:
        before = self.newest
        super().receive(message)
        if isinstance(message, Stop) and self.newest > before and self.point in ("OPTIMIZER", "AFTER_WRITE"):
            point, self.stop_seen = self.point, self.newest
            self._stand_still()
            self.standing_in = 0
            self._go_to(point)


class ObeysOldOrders(Worker):
    """Restore and Resume are obeyed whatever generation they are of."""

    def _has(self, kind: type, generation: int) -> bool:
        return kind in self.orders or super()._has(kind, generation)


class MeetsWithoutGeneration(Worker):
    """D1: the generation is missing from the keys of the rendezvous."""

    def _begin_forming(self, generation: int) -> None:
        first = min(self.world.meetings, default=generation)  # type: ignore[attr-defined]
        super()._begin_forming(first if self.newest <= generation else generation)

    def _is_formed(self, generation: int) -> bool:  # noqa: ARG002
        return super()._is_formed(self.meeting_generation)


class ForgetsItsPreparation(Worker):
    """A survivor reports its version, and not that it could finish the step."""

    def _stand_still(self) -> None:
        prepared, self.prepared = self.prepared, -1
        super()._stand_still()
        self.prepared = prepared


class RepeatsWithAnotherBatch(Worker):
    """A repeated step draws the next batch, and the private state that belongs to it."""

    def _recover(self, *, torn: bool = False) -> None:
        if self.point in ("FORWARD", "GRADIENT"):
            self.private = hash((9, self.private))
        super()._recover(torn=torn)


class WaitsForBeginOnly(Worker):
    """Once ours: a rank whose Begin was lost with its agent did not hear Stop either."""

    def _can_go(self) -> bool:
        if self.point == "ENTERED" and self.closed:
            return False
        return super()._can_go()


class LeavesAlone(Worker):
    """Done is done: after its last step a rank leaves without waiting for the others."""

    def _finish(self) -> None:
        super()._finish()
        self.orders.setdefault(Release, Restore)
        self.poke()


class _OnlySlot(Lower):
    overwrites_the_only_one: ClassVar[bool] = True


class OverwritesTheOnlySnapshot(Worker):
    """The next snapshot goes over the last one that is complete everywhere."""

    lower_kind: ClassVar[type[Lower]] = _OnlySlot


class _KeepsNothing(Lower):
    forgets_what_to_keep: ClassVar[bool] = True


class ForgetsWhatToKeep(Worker):
    """After a recovery, in which ranks may know different versions to be complete, each goes by what it knows."""

    lower_kind: ClassVar[type[Lower]] = _KeepsNothing


class _KeepsWhatIsUndone(Lower):
    keeps_what_is_undone: ClassVar[bool] = True


class KeepsWhatIsUndone(Worker):
    """A snapshot of a version that was undone lies beside those of the same version that came after."""

    lower_kind: ClassVar[type[Lower]] = _KeepsWhatIsUndone


class _MixesHistories(Lower):
    mixes_histories: ClassVar[bool] = True


class MixesHistoriesOnDisk(Worker):
    """Once ours: pieces of a checkpoint that was left incomplete counted for the same step of a later history."""

    lower_kind: ClassVar[type[Lower]] = _MixesHistories


# --- other agents -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gatherer:
    """How long an agent lets reports of its ranks wait for each other."""

    hold_seconds: float = HOLD_SECONDS


class GathersForEver(Gatherer):
    """The reports of a host's ranks wait for a rank that hangs, so the controller blames all of them."""


# --- the list -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Mutation:
    """A variant. Some of the first `within` random schedules must break an invariant.

    `actions`, `points`, `hosts` and `ladder` narrow the schedules down, for bugs that need two rare faults at once.
    """

    name: str
    within: int
    rule: Rule = decide
    controller: type[Controller] = Controller
    worker: type[Worker] = Worker
    detector: type[Detector] = Detector
    agent: Gatherer = Gatherer()
    actions: tuple[Action, ...] = ()
    points: tuple[str, ...] = ()
    hosts: bool | None = None
    ladder: bool = False

    @property
    def what(self) -> str:
        """What is wrong with it, in words."""
        for kind, original in ((self.controller, Controller), (self.worker, Worker), (self.detector, Detector)):
            if kind is not original:
                return (kind.__doc__ or "").strip()
        if type(self.agent) is not Gatherer:
            return (self.agent.__doc__ or "").strip()
        return (self.rule.__doc__ or "").strip()

    @contextmanager
    def planted(self) -> Iterator[Parts]:
        """The parts to build a simulated job from, while this lasts."""
        with _rule(self.rule):
            yield Parts(self.controller, self.worker, self.detector, self.agent.hold_seconds)

    def breaks(self, schedule: Schedule) -> Violation | None:
        """The invariant that the variant breaks in this schedule."""
        with self.planted() as parts:
            try:
                SimulatedJob(schedule, parts).run()
            except Violation as violation:
                return violation
        return None

    def schedule(self, seed: int) -> Schedule:
        """The random schedule of this seed."""
        if not self.points:
            return random_schedule(seed, hosts=self.hosts, ladder=self.ladder)
        return random_schedule(seed, faults=3, actions=self.actions, points=self.points, ladder=self.ladder)

    def hunt(self, first: int = 0, limit: int = 0) -> tuple[int, Violation] | None:
        """The number of random schedules that it took, and what broke."""
        for count in range(1, (limit or self.within) + 1):
            violation = self.breaks(self.schedule(first + count - 1))
            if violation is not None:
                return count, violation
        return None


# Where a second death finds ranks on their way down.
_FALLING = ("OUTSIDE", "FORWARD", "READY", "OBEY", "COPY", "ROLLBACK", "REFORM", "RESTORED", "RESUME")
MUTATIONS = (
    Mutation("dead-ranks-tag", 100, controller=DecidesFromTheDeadRanksTag),
    Mutation("newest-of-survivors", 500, rule=newest_of_the_survivors),
    Mutation("forward-if-any", 100, rule=forward_if_any_is_prepared),
    Mutation("forward-if-most", 200, rule=forward_if_most_are_prepared),
    Mutation("always-back", 500, rule=always_back),
    Mutation("prepared-not-asked", 500, rule=prepared_is_not_asked_for),
    Mutation("private-ignored", 200, rule=private_state_is_forgotten),
    Mutation("copies-over-intact", 50, rule=one_source_and_the_rest_copies),
    Mutation("before-all-stand-still", 50, controller=DecidesBeforeAllStandStill),
    Mutation("stale-positions", 500, controller=DecidesFromStalePositions),
    Mutation("generation-twice", 50, controller=UsesAGenerationTwice),
    Mutation("old-stopped", 5000, controller=BelievesOldReports),
    Mutation("old-restored", 20000, controller=BelievesOldRestores),
    Mutation("old-done", 50000, controller=BelievesOldEnds),
    Mutation("resumes-without-last", 200, controller=ResumesWithoutTheLast),
    Mutation("rank-given-too-soon", 1000, controller=GivesARankAwayTooSoon),
    Mutation("restored-replacement-forgotten", 3000, controller=ForgetsRestoredReplacements),
    Mutation("predecessors-forgotten", 3000, controller=ForgetsThePredecessors),
    Mutation("page-of-the-dying-not-read", 1000, controller=WaitsForTheMemoryOfTheDead),
    Mutation("frozen-at-the-end", 600, controller=IgnoresFrozenProcessesAtTheEnd),
    Mutation("broken-collective-ignored", 600, controller=IgnoresBrokenCollectives),
    Mutation(
        "slow-restore-blames-all",
        5000,
        controller=BlamesEveryoneForASlowRestore,
        actions=(Action.KILL, Action.LOOP),
        points=("READY", "BARRIER", "ROLLBACK", "REFORM"),
    ),
    Mutation("stop-deadline-without-effect", 6000, controller=ComparesTheStopDeadlineInAnotherWay),
    Mutation("nothing-said-again", 2000, controller=SaysNothingAgain),
    Mutation("unknown-ends-alike", 2000, controller=TakesUnknownEndsForAlike),
    Mutation("blames-who-stops-later", 2000, detector=BlamesWhoStopsLater),
    Mutation(
        "finishing-is-training",
        5000,
        detector=TakesFinishingForTraining,
        actions=(Action.LOOP,),
        points=("READY", "BARRIER", "FINISH", "OPTIMIZER", "AFTER_WRITE"),
    ),
    Mutation("done-do-not-count", 5000, detector=DoesNotCountTheDone),
    Mutation(
        "all-parked",
        5000,
        detector=ForgetsThoseWhoAreAllParked,
        actions=(Action.KILL, Action.LOOP),
        points=("FORWARD", "RESUME", "RESUME"),
    ),
    Mutation(
        "oversleeps",
        2000,
        controller=Oversleeps,
        actions=(Action.KILL, Action.LOOP),
        points=("FORWARD", "ROLLBACK", "REFORM"),
    ),
    Mutation("restart-reuses-generation", 2000, controller=ReusesAGenerationAfterItsRestart),
    Mutation("restart-says-nothing", 2000, controller=SaysNothingAfterItsRestart),
    Mutation("blames-the-bereft", 10000, detector=BlamesTheBereft, hosts=True),
    Mutation("compares-out-of-sight", 5000, detector=ComparesWithWhoIsOutOfSight, hosts=True),
    Mutation("agents-look-alike", 20000, controller=TakesAnotherAgentForTheSame),
    Mutation("pages-outlive-agents", 1000, controller=TrustsThePagesOfALostAgent, hosts=True),
    Mutation("last-host-at-the-end", 1000, controller=WaitsForTheLostAtTheEnd, hosts=True),
    Mutation("placed-on-lost-host", 200, controller=PlacesOnALostHost, hosts=True),
    Mutation("zombies-are-sources", 200, controller=CopiesFromZombies, hosts=True),
    Mutation("lost-private-derived", 200, controller=DerivesWhateverIsLost, hosts=True),
    Mutation("lost-host-is-awaited", 200, controller=WaitsForALostHost, hosts=True),
    Mutation("gathers-for-ever", 5000, agent=GathersForEver(hold_seconds=10_000.0)),
    Mutation("parts-forgotten", 1000, controller=ForgetsTheParts),
    Mutation("fall-forgotten", 20000, controller=ForgetsThatItWentDown, ladder=True),
    Mutation("living-for-snapshots", 20000, controller=TakesTheLivingForSnapshots, hosts=True, ladder=True),
    Mutation("keeps-to-the-buddies", 20000, controller=KeepsToTheBuddies, hosts=True, ladder=True),
    Mutation("only-snapshot-overwritten", 20000, worker=OverwritesTheOnlySnapshot, ladder=True),
    Mutation("what-to-keep-forgotten", 50000, worker=ForgetsWhatToKeep, ladder=True),
    Mutation(
        "undone-snapshots-kept",
        20000,
        worker=KeepsWhatIsUndone,
        actions=(Action.KILL,),
        points=_FALLING,
        ladder=True,
    ),
    Mutation(
        "histories-mixed",
        20000,
        worker=MixesHistoriesOnDisk,
        actions=(Action.KILL,),
        points=_FALLING,
        ladder=True,
    ),
    Mutation("compares-seldom-heard", 10000, detector=ComparesThoughSeldomHeard, hosts=True),
    Mutation("slow-samples-are-none", 5000, detector=TakesSlowSamplingForBlindness, hosts=True),
    Mutation("private-not-claimed", 200, worker=DoesNotClaimPrivateState),
    Mutation("private-kept-too-late", 200, worker=KeepsPrivateStateTooLate),
    Mutation("write-interrupted", 200, worker=StopsInsideTheWrite),
    Mutation("no-barrier", 50, worker=HasNoBarrier),
    Mutation("restored-in-place", 500, worker=RestoresInPlace),
    Mutation("published-a-step-early", 50, worker=PublishesEarly),
    Mutation("published-before-all-hold-it", 50, worker=PublishesItsOwnStep),
    Mutation("stop-answered-in-the-write", 500, worker=AnswersStopAtOnce),
    Mutation("old-orders-obeyed", 500, worker=ObeysOldOrders),
    Mutation("rendezvous-without-generation", 500, worker=MeetsWithoutGeneration),
    Mutation("preparation-forgotten", 500, worker=ForgetsItsPreparation),
    Mutation("repeated-with-another-batch", 200, worker=RepeatsWithAnotherBatch),
    Mutation("begin-lost", 20000, worker=WaitsForBeginOnly),
    Mutation("leaves-alone", 100, worker=LeavesAlone),
)


def find_mutation(name: str) -> Mutation:
    """By name. Raises KeyError."""
    return {mutation.name: mutation for mutation in MUTATIONS}[name]
