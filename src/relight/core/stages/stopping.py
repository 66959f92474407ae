"""STOPPING: every member stands still and says where, every rank has a process, the failed are dead: then decide."""

from collections.abc import Sequence

import msgspec

from relight.core import events as ev
from relight.core.commands import Audience, Command, FallbackTier, Notice, Restore, Source
from relight.core.decision import Decision, Halt, decide, derived_ranks, describe_target
from relight.core.fallback import has_gone_back, newest_snapshots, newest_to_trust, plan_fallback, worth_keeping
from relight.core.shards import require_every_part
from relight.core.stages.failing import Failing
from relight.core.stages.state import Stage

# A replacement copies from a few replicas at once; an order that named ten thousand would be a megabyte for each agent.
MAX_SOURCES_PER_TARGET = 16
MAX_SOURCES = 256


class Stopping(Failing):
    """From Stop to Restore."""

    def _on_stopped(self, event: ev.Stopped, now: float) -> list[Command]:
        if self.stage not in (Stage.STOPPING, Stage.SAVING) or event.generation != self.generation:
            return []
        if not self._is_member(event.process):
            return []
        self._attempt.stopped[event.process] = event
        self.job_stats.stopped(event, now)
        return self._advance(now)

    def _on_stop_timeout(self, now: float) -> list[Command]:
        if late := self._late(now):
            return [*self._blame_late(late, now), *self._fail(late, -1, None, now)]
        limit = self._attempt.stop_limit_seconds
        out = self._fill_vacancies(now)
        if self._deadline is None:
            self._deadline = min((p.asked_at + limit for p in self._moving()), default=now + limit)
        return out

    def _advance(self, now: float) -> list[Command]:
        """Decide as soon as every rank has a process, all stand still, and every failed process is known dead."""
        if self.stage is Stage.SAVING:
            return self._save_once_still(now)
        if self.stage is not Stage.STOPPING:
            return []
        if not self.members.is_complete(self.settings.world_size):
            return self._fill_vacancies(now)
        if len(self._attempt.stopped) < self.settings.world_size:  # the usual answer, without a look at every rank
            return []
        held, stopped = self.members.by_rank(), self._attempt.stopped
        if self.members.dying() or any(p.name not in stopped for p in held.values()) or self._is_put_off(now):
            return []
        replaced = [rank for rank, p in held.items() if p.replacement]
        reports = [stopped[p.name] for p in held.values()]
        private = self._lost_private(reports)
        derived = derived_ranks(reports, private)
        known = {rank: versions for rank, versions in private.items() if rank not in derived}
        unfinished, fallback = self._unfinished, self._fallback
        if unfinished is None and fallback.distrusts:
            return self._fall_back(fallback.difference, reports, now)
        if unfinished is not None:
            distrusted = 0 <= fallback.differed_at <= unfinished
            if distrusted or not has_gone_back(reports, unfinished):
                return self._fall_back("the recovery that goes back that far is not finished", reports, now)
        decision = require_every_part(decide(reports, known, self.settings.world_size), self.shards)
        if isinstance(decision, Halt) and decision.lost:
            return self._fall_back(decision.reason, reports, now)
        if isinstance(decision, Halt):
            return self._end(f"{decision.reason}. {self._advice()}", now, self._last_traceback())
        self.stage, self._attempt.decision = Stage.RESTORING, decision
        for process in held.values():
            process.may_hold_state = True
        self._deadline = now + self.settings.restore_timeout_seconds
        self.job_stats.decided(decision, [p for p in held.values() if p.replacement], now)
        served = {r.rank: self._source(r) for r in reports}
        lost = [self.members.processes[name] for rank in replaced for name in self.members.predecessors.get(rank, ())]
        begun = {r.step for r in reports if not r.blank} | {p.final_position.step for p in lost}
        if decision.target in begun:
            self._attempts.add(decision.target)
        return [
            Restore(
                audience=Audience.MEMBERS,
                generation=self.generation,
                target=decision.target,
                attempt=self._attempts[decision.target],
                sources=tuple(served[rank] for rank in self._choose_sources(decision)),
                targets=decision.targets,
                derived=derived,
                history=self._history,
                distrust=self._fallback.differed_at,
                keep=self._worth_keeping(reports),
                why=f"{describe_target(decision.direction, decision.target)}: {decision.reason}",
            )
        ]

    @property
    def _unfinished(self) -> int | None:
        """The version that a recovery below replicas goes back to, while not all are there; None: there is none."""
        return self._fallback.target if self._fallback.is_under_way else None

    def _lost_private(self, reports: Sequence[ev.Stopped]) -> dict[int, frozenset[int]]:
        """Of each blank rank, the versions of its private state that are left: with its dead predecessors' pages. A
        survivor that is blank threw its own away, on a way down that was cut short."""
        return {report.rank: self._private_versions(report.rank) for report in reports if report.blank}

    def _private_versions(self, rank: int) -> frozenset[int]:
        """On the way down only that of the version all go to counts: any other is undone, and would hide that nothing
        is left, in which case it may follow from rank and step."""
        versions = self.members.private_versions(rank)
        return versions if self._unfinished is None else versions & {self._unfinished}

    def _worth_keeping(self, reports: Sequence[ev.Stopped]) -> int:
        """The version whose snapshots must not be overwritten yet, or -1."""
        if not self.buddy_every:
            return -1
        if self._unfinished is None:
            return worth_keeping(reports, self.shards)
        snapshots = newest_snapshots(reports, self.shards, self._unfinished)
        return -1 if snapshots is None else snapshots[0]

    def _source(self, report: ev.Stopped, of: int = -1) -> Source:
        part = self.shards.key(report.rank if of < 0 else of)
        address, endpoint = report.restore_address, report.restore_endpoint
        return Source(rank=report.rank, address=address, endpoint=endpoint, shard=part, of=of)

    def _fall_back(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        """What the replicas hold is not enough: the highest tier below them that is, or the end of the job."""
        trusted = newest_to_trust(reports, self._fallback.differed_at)
        plan = plan_fallback(reason, reports, self.shards, self._unfinished, trusted)
        if plan is None and self._fallback.distrusts:
            known = f"replicas agreed last at version {max(report.agreed for report in reports)}"
            return self._end(
                f"{self._fallback.difference}. No buddy and no checkpoint holds a version from before that ({known}). "
                "Do not go on from a newer checkpoint",
                now,
            )
        if plan is None:
            if self._fallback.is_under_way:
                target = self._fallback.target
                reason = f"all were going back to version {target}, and of some rank's state every copy is lost"
            lost = self._all_lost() if self._lost_without() else f"{reason}. {self._advice()}"
            return self._end(lost, now, self._last_traceback())
        held = self.members.by_rank()
        dead = [self.members.processes[name] for names in self.members.predecessors.values() for name in names]
        finished = [self._fallback.newest_finished, *(r.version for r in reports if not r.blank)]
        finished += [process.final_position.version for process in dead]
        newest = max(finished)
        self._fallback = msgspec.structs.replace(self._fallback, target=plan.target, newest_finished=newest)
        self._history = self.generation
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
        self.stage, self._attempt.decision = Stage.RESTORING, decision
        for process in held.values():
            process.may_hold_state = True
        self._deadline = now + self.settings.restore_timeout_seconds
        self.job_stats.decided(decision, [p for p in held.values() if p.replacement], now, plan.tier, undone)
        self._attempts.add(plan.target)
        asked = {plan.places[rank] for rank in plan.targets} or {(source, -1) for source in plan.sources}
        steps = f"{undone} finished step{'s are' if undone != 1 else ' is'}"
        went = f"from version {newest}: {steps} computed again"
        return [
            Restore(
                audience=Audience.MEMBERS,
                generation=self.generation,
                target=plan.target,
                attempt=self._attempts[plan.target],
                sources=tuple(self._source(reports[holder], of) for holder, of in sorted(asked)),
                targets=plan.targets,
                derived=tuple(rank for rank, (_, of) in enumerate(plan.places) if of not in (rank, -1)),
                tier=plan.tier,
                undone=undone,
                history=self._history,
                distrust=self._fallback.differed_at,
                keep=plan.target if plan.tier is FallbackTier.BUDDY else -1,
                why=f"fallback to the {plan.tier}: back to version {plan.target} {went}, because {reason}",
            ),
            Notice(
                why=f"fallback to the {plan.tier}: all ranks go back to version {plan.target} {went}", level="warning"
            ),
        ]

    def _choose_sources(self, decision: Decision) -> Sequence[int]:
        """Of the ranks that can serve, enough for the targets; of each part of the state, if it is divided.

        Without a target none is needed, but they are named all the same while they are few: that costs nothing.
        """
        count = min(MAX_SOURCES, MAX_SOURCES_PER_TARGET * max(1, len(decision.targets)))
        if len(decision.sources) <= count:
            return decision.sources
        held = self.members.by_rank()
        hosts = {held[rank].agent for rank in decision.targets}
        parts: dict[str, list[int]] = {}
        for rank in decision.sources:
            parts.setdefault(self.shards.key(rank), []).append(rank)
        chosen: list[int] = []
        for ranks in parts.values():
            near = [rank for rank in ranks if held[rank].agent in hosts][: count // 2]
            far = [rank for rank in ranks if held[rank].agent not in hosts]
            room = count - len(near)
            chosen += [*near, *far[:: max(1, len(far) // room)][:room]]  # from hosts everywhere: each has a line
        return sorted(chosen)
