"""The decision of a recovery, once every rank is paused: from replicas, or from a fallback tier."""

from collections.abc import Collection, Sequence

import msgspec

from relight.core.job.job import Job, Stage
from relight.core.membership.members import Process
from relight.core.membership.recent import Recent
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, FallbackTier, Notice, Restore, Source
from relight.core.protocol.position import Phase
from relight.core.recovery.alone import Meeting, follow_one, where_all_meet
from relight.core.recovery.decision import Decision, Halt, decide, derived_ranks, describe_target
from relight.core.recovery.fallback import (
    FallbackPlan,
    has_gone_back,
    newest_snapshots,
    newest_to_trust,
    plan_fallback,
    worth_keeping,
)
from relight.core.recovery.shards import require_every_part

# A replacement copies from a few replicas at once; an order that named ten thousand would be a megabyte for each agent.
MAX_SOURCES_PER_TARGET = 16
MAX_SOURCES = 256


class Deciding:
    """From the reports of all ranks to Restore, or to the end of the job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._history = 0  # the generation that last undid versions
        self._starts: Recent[int] = Recent()  # how often each step was started again

    @property
    def can_decide(self) -> bool:
        """False if ranks wait in a collective between two steps, and not all can meet there."""
        reports = self._reports()
        if not any(report.at_collective for report in reports):
            return True
        decision = self._choose(reports)
        if isinstance(decision, Halt) or self._distrusts_replicas(reports):
            return False
        return self._where_all_meet(decision, reports) is not None

    def decide(self, now: float) -> list[Command]:
        """Order the restore that the reports allow, or end the job."""
        job = self._job
        held, reports = job.members.by_rank(), self._reports()
        if reason := self._distrusts_replicas(reports):
            return self._fall_back(reason, reports, now)
        decision = self._choose(reports)
        if isinstance(decision, Halt) and decision.lost:
            return self._fall_back(decision.reason, reports, now)
        if isinstance(decision, Halt):
            return job.end(f"{decision.reason}. {job.advice()}", now, job.last_traceback())
        is_wanted = decision.targets or any(report.at_collective for report in reports)
        if is_wanted and (meeting := self._where_all_meet(decision, reports)) is not None:
            decision = msgspec.structs.replace(
                decision, runs_code=True, meets_at=meeting.at, given=meeting.given, sources=meeting.sources
            )
        self._begin_restore(decision, now)
        served = {r.rank: self._source(r) for r in reports}
        if decision.target in self._begun_steps(reports, held):
            self._starts.add(decision.target)
        return [
            Restore(
                generation=job.generation,
                target=decision.target,
                attempt=self._starts[decision.target],
                sources=tuple(served[rank] for rank in self._choose_sources(decision)),
                targets=decision.targets,
                derived=self._derived(reports),
                history=self._history,
                distrust=job.fallback.differed_at,
                keep=self._worth_keeping(reports),
                runs_code=decision.runs_code,
                meets_at=decision.meets_at,
                given=decision.given,
                why=f"{describe_target(decision.direction, decision.target)}: {decision.reason}",
            )
        ]

    def _reports(self) -> list[ev.Stopped]:
        """The reports of all ranks, in their order."""
        job = self._job
        return [job.attempt.stopped[process.name] for process in job.members.by_rank().values()]

    def _derived(self, reports: Sequence[ev.Stopped]) -> tuple[int, ...]:
        return derived_ranks(reports, self._lost_private(reports))

    def _choose(self, reports: Sequence[ev.Stopped]) -> Decision | Halt:
        """Decide from replicas."""
        job, derived = self._job, self._derived(reports)
        known = {rank: found for rank, found in self._lost_private(reports).items() if rank not in derived}
        chosen = self._follow(decide(reports, known, job.settings.world_size), reports)
        return require_every_part(chosen, job.shards)

    def _where_all_meet(self, decision: Decision, reports: Sequence[ev.Stopped]) -> Meeting | None:
        return where_all_meet(decision, reports, self._must_not_run(decision.target))

    def _must_not_run(self, target: int) -> bool:
        """Return whether no replacement may run the code before step `target`: it has failed in one, or was run."""
        return self._job.go_alone or self._has_gone_on(target)

    def _has_gone_on(self, target: int) -> bool:
        """Return whether a lost rank had asked for step `target`, so that it had run all code before that."""
        members = self._job.members
        lost = [members.processes[name] for names in members.predecessors.values() for name in names]
        return any(process.final_position.step >= target for process in lost)

    def _follow(self, decision: Decision | Halt, reports: Sequence[ev.Stopped]) -> Decision | Halt:
        """Choose whose state counts where ranks went on alone after a collective between two steps."""
        job = self._job
        copies = [rank for rank, process in job.members.by_rank().items() if process.replacement]
        return follow_one(decision, reports, copies, job.shards, differ=job.went_apart)

    def _distrusts_replicas(self, reports: Sequence[ev.Stopped]) -> str:
        """The reason to fall back whatever replicas hold, or an empty string."""
        fallback, unfinished = self._job.fallback, self._unfinished
        if unfinished is None:
            return fallback.difference if fallback.distrusts else ""
        distrusted = 0 <= fallback.differed_at <= unfinished
        if distrusted or not has_gone_back(reports, unfinished):
            return "the recovery that goes back that far is not finished"
        return ""

    def _begin_restore(
        self, decision: Decision, now: float, tier: FallbackTier = FallbackTier.REPLICA, undone: int = 0
    ) -> None:
        job, held = self._job, self._job.members.by_rank().values()
        job.stage, job.attempt.decision = Stage.RESTORING, decision
        for process in held:
            process.may_hold_state = True
        job.deadline = now + job.settings.restore_timeout_seconds
        job.job_stats.decided(decision, [p for p in held if p.replacement], now, tier, undone)

    def _begun_steps(self, reports: Sequence[ev.Stopped], held: dict[int, Process]) -> Collection[int]:
        """Steps that some rank had started, by the ranks' reports and the pages of lost ones.

        A rank of a host that is drained has paused between two steps. One that died there counts: a fault that is
        planned for this place strikes once, and so does an error that the next attempt might not have.
        """
        members, draining = self._job.members, self._job.hosts.draining
        replaced = [rank for rank, p in held.items() if p.replacement]
        lost = [members.processes[name] for rank in replaced for name in members.predecessors.get(rank, ())]
        paused = [p for p in lost if p.agent in draining and p.final_position.phase in (Phase.OUTSIDE, Phase.DONE)]
        begun = {process.final_position.step for process in lost if process not in paused}
        return {r.step for r in reports if not r.blank} | begun

    # --- private state ------------------------------------------------------------------------------------------
    @property
    def _unfinished(self) -> int | None:
        """The version that a fallback goes back to, until every rank holds it; None: no fallback is under way."""
        return self._job.fallback.target if self._job.fallback.is_under_way else None

    def _lost_private(self, reports: Sequence[ev.Stopped]) -> dict[int, frozenset[int]]:
        """For each blank rank, the versions of its private state that are left in its dead predecessors' pages.

        A survivor that is blank discarded its own in a fallback that was interrupted.
        """
        return {report.rank: self._private_versions(report.rank) for report in reports if report.blank}

    def _private_versions(self, rank: int) -> frozenset[int]:
        """Versions for which a rank's private state is left; in a fallback only its target counts.

        Others are undone, and would hide that the state is lost, in which case it may follow from rank and step.
        """
        versions = self._job.members.private_versions(rank)
        return versions if self._unfinished is None else versions & {self._unfinished}

    # --- sources and snapshots ----------------------------------------------------------------------------------
    def _worth_keeping(self, reports: Sequence[ev.Stopped]) -> int:
        """The version whose snapshots must not be overwritten yet, or -1."""
        if not self._job.buddy_every:
            return -1
        if self._unfinished is None:
            return worth_keeping(reports, self._job.shards)
        snapshots = newest_snapshots(reports, self._job.shards, self._unfinished)
        return -1 if snapshots is None else snapshots[0]

    def _source(self, report: ev.Stopped, of: int = -1) -> Source:
        part = self._job.shards.key(report.rank if of < 0 else of)
        address, endpoint = report.restore_address, report.restore_endpoint
        return Source(rank=report.rank, address=address, endpoint=endpoint, shard=part, of=of)

    def _choose_sources(self, decision: Decision) -> Sequence[int]:
        """Choose, for each part of the state, enough of the ranks that can serve the targets.

        Without a target none is needed, but they are named all the same while they are few: that costs nothing.
        """
        asking = len(decision.targets) + len(decision.given)
        count = min(MAX_SOURCES, MAX_SOURCES_PER_TARGET * max(1, asking))
        if len(decision.sources) <= count:
            return decision.sources
        held = self._job.members.by_rank()
        hosts = {held[rank].agent for rank in decision.targets}
        parts: dict[str, list[int]] = {}
        for rank in decision.sources:
            parts.setdefault(self._job.shards.key(rank), []).append(rank)
        chosen: list[int] = []
        for ranks in parts.values():
            near = [rank for rank in ranks if held[rank].agent in hosts][: count // 2]
            far = [rank for rank in ranks if held[rank].agent not in hosts]
            room = count - len(near)
            chosen += [*near, *far[:: max(1, len(far) // room)][:room]]  # from hosts everywhere: each has a line
        return sorted(chosen)

    # --- fallback -----------------------------------------------------------------------------------------------
    def _fall_back(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        """Order all ranks back to the highest tier that holds all of the state; without one, end the job."""
        job = self._job
        trusted = newest_to_trust(reports, job.fallback.differed_at)
        plan = plan_fallback(reason, reports, job.shards, self._unfinished, trusted)
        if plan is None:
            return self._end_without_fallback(reason, reports, now)
        dead = [job.members.processes[name] for names in job.members.predecessors.values() for name in names]
        finished = [job.fallback.newest_finished, *(r.version for r in reports if not r.blank)]
        newest = max([*finished, *(process.final_position.version for process in dead)])
        job.fallback = msgspec.structs.replace(job.fallback, target=plan.target, newest_finished=newest)
        self._history = job.generation
        undone = max(0, newest - plan.target)
        decision = Decision(
            target=plan.target,
            direction="back",
            reason=f"{plan.reason}; the {plan.tier} holds version {plan.target} of all of the state",
            sources=plan.sources,
            finishers=(),
            targets=plan.targets,
            recalled=tuple(rank for rank in plan.targets if plan.places[rank][1] == rank),
        )
        self._begin_restore(decision, now, plan.tier, undone)
        self._starts.add(plan.target)
        steps = f"{undone} finished step{'s are' if undone != 1 else ' is'}"
        cost = f"from version {newest}: {steps} computed again"
        text = f"fallback to the {plan.tier}: all ranks go back to version {plan.target} {cost}"
        return [self._fallback_order(plan, reports, undone, cost), Notice(why=text, level="warning")]

    def _fallback_order(self, plan: FallbackPlan, reports: Sequence[ev.Stopped], undone: int, cost: str) -> Restore:
        asked = {plan.places[rank] for rank in plan.targets} or {(source, -1) for source in plan.sources}
        return Restore(
            generation=self._job.generation,
            target=plan.target,
            attempt=self._starts[plan.target],
            sources=tuple(self._source(reports[holder], of) for holder, of in sorted(asked)),
            targets=plan.targets,
            derived=tuple(rank for rank, (_, of) in enumerate(plan.places) if of not in (rank, -1)),
            tier=plan.tier,
            undone=undone,
            history=self._history,
            distrust=self._job.fallback.differed_at,
            keep=plan.target if plan.tier is FallbackTier.BUDDY else -1,
            why=f"fallback to the {plan.tier}: back to version {plan.target} {cost}, because {plan.reason}",
        )

    def _end_without_fallback(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        job, fallback = self._job, self._job.fallback
        if fallback.distrusts:
            known = f"replicas agreed last at version {max(report.agreed for report in reports)}"
            error = (
                f"{fallback.difference}. No buddy and no checkpoint holds a version from before that ({known}). "
                "Do not go on from a newer checkpoint"
            )
            return job.end(error, now)
        if fallback.is_under_way:
            reason = f"all were going back to version {fallback.target}, and of some rank's state every copy is lost"
        lost = job.describe_loss() if job.lost_without() else f"{reason}. {job.advice()}"
        return job.end(lost, now, job.last_traceback())
