"""STOPPING: every member stands still and says where, every rank has a process, the failed are dead: then decide."""

from collections.abc import Mapping, Sequence

from relight.core import events as ev
from relight.core.commands import Audience, Command, Restore, Source
from relight.core.decision import Decision, Halt, decide
from relight.core.shards import require_every_part
from relight.core.stages.failing import Failing
from relight.core.stages.state import Stage

# A replacement copies from a few replicas at once; an order that named ten thousand would be a megabyte for each agent.
MAX_SOURCES_PER_TARGET = 16
MAX_SOURCES = 256


class Stopping(Failing):
    """From Stop to Restore."""

    def _on_stopped(self, event: ev.Stopped, now: float) -> list[Command]:
        if self.stage is not Stage.STOPPING or event.generation != self.generation:
            return []
        if not self._is_member(event.process):
            return []
        self._stopped[event.process] = event
        self.ledger.stopped(event, now)
        return self._advance(now)

    def _on_stop_timeout(self, now: float) -> list[Command]:
        limit = self._stop_limit_seconds
        waiting = [p for p in self.members.by_rank().values() if p.name not in self._stopped]
        late = [p for p in waiting if p.asked_at + limit <= now]
        if late:
            return self._fail_late(late, f"did not stop within {limit:g} s", now)
        out = self._fill_vacancies(now)
        if self._deadline is None:
            self._deadline = min((p.asked_at + limit for p in waiting), default=now + limit)
        return out

    def _advance(self, now: float) -> list[Command]:
        """Decide as soon as every rank has a process, all stand still, and every failed process is known dead."""
        if self.stage is not Stage.STOPPING:
            return []
        if not self.members.is_complete(self.settings.world_size):
            return self._fill_vacancies(now)
        if len(self._stopped) < self.settings.world_size:  # the usual answer, without a look at every rank
            return []
        held = self.members.by_rank()
        if self.members.dying() or any(p.name not in self._stopped for p in held.values()):
            return []
        replaced = [rank for rank, p in held.items() if p.replacement]
        reports = [self._stopped[p.name] for p in held.values()]
        blank = {r.rank for r in reports if r.blank}
        private = {rank: self.members.private_versions(rank) for rank in replaced if rank in blank}
        derived = _derived(reports, private)
        known = {rank: versions for rank, versions in private.items() if rank not in derived}
        decision = require_every_part(decide(reports, known, self.settings.world_size), self.shards)
        if isinstance(decision, Halt):
            return self._end(f"{decision.reason}. Resume from your last checkpoint", now, self._last_traceback())
        self.stage, self._decision = Stage.RESTORING, decision
        for process in held.values():
            process.may_hold_state = True
        self._deadline = now + self.settings.restore_timeout_seconds
        self.ledger.decided(decision, [p for p in held.values() if p.replacement], now)
        served = {
            r.rank: Source(
                rank=r.rank, address=r.restore_address, endpoint=r.restore_endpoint, shard=self.shards.key(r.rank)
            )
            for r in reports
        }
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
                why=f"{decision.direction} to version {decision.target}: {decision.reason}",
            )
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


def _derived(reports: Sequence[ev.Stopped], private: Mapping[int, frozenset[int]]) -> tuple[int, ...]:
    """Lost ranks of whose private state nothing is left, not even the page: their host is gone.

    All ranks run the same script. If the private state of the intact ones is but a function of rank and step, so is
    that of the lost ones, for any version.
    """
    intact = [report for report in reports if not report.blank and not report.torn]
    if not all(report.derivable for report in intact):
        return ()
    return tuple(rank for rank, versions in sorted(private.items()) if not versions)
