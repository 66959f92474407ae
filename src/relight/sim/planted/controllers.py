"""Other controllers: each differs from the production one in one decision."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from relight.core import events as ev
from relight.core.buddies import choose_buddies
from relight.core.commands import Command, Kill, Restore, Save, Source
from relight.core.controller import HEARING_SECONDS, Controller, Stage
from relight.core.decision import Decision, Halt, decide
from relight.core.fallback import newest_snapshots
from relight.core.members import Process
from relight.core.position import Phase
from relight.sim.planted.rules import (
    Private,
    intact_versions,
    make_decision,
    outvoted_by_one,
    planted_rule,
    replaced,
)


class DecidesFromTheDeadRanksTag(Controller):
    """A1, the published rule: in or after the optimizer, forward; before it, back. The dead rank's page decides."""

    def _advance(self, now: float) -> list[Command]:
        with planted_rule(self._by_tag):
            return super()._advance(now)

    def _by_tag(self, reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
        tags = [self.members.processes[names[-1]].final_position for names in self.members.predecessors.values()]
        if not tags or not intact_versions(reports):
            return decide(reports, private, world_size)
        base = min(intact_versions(reports))
        past = any(tag.phase is Phase.OPTIMIZER or tag.version > base for tag in tags)
        return make_decision(reports, world_size, base + past)


class DecidesBeforeAllStandStill(Controller):
    """A2: takes the newest reports for the missing ones."""

    def _advance(self, now: float) -> list[Command]:
        known = [report for report in self._attempt.stopped.values() if not report.blank]
        if self.stage is Stage.STOPPING and known:
            for rank, process in self.members.by_rank().items():
                guess = msgspec.structs.replace(known[-1], process=process.name, rank=rank, blank=process.replacement)
                self._attempt.stopped.setdefault(process.name, guess)
        return super()._advance(now)


class DecidesFromStalePositions(Controller):
    """Reports from the generation before are good enough: where a rank stood, it stands."""

    def _open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        before = dict(self._attempt.stopped)
        out = super()._open_generation(now, stop_limit_seconds)
        if self.stage is Stage.STOPPING:
            self._attempt.stopped.update(before)
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
        before = dict(self._attempt.done)
        out = super()._open_generation(now, stop_limit_seconds)
        self._attempt.done.update(before)
        return out


class ResumesWithoutTheLast(Controller):
    """The last rank will be restored soon enough."""

    def _on_restored(self, event: ev.Restored, now: float) -> list[Command]:
        out = super()._on_restored(event, now)
        missing = [p for p in self.members.by_rank().values() if p.name not in self._attempt.restored]
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
        if self._attempt.suspected_restore is not None:
            return super()._on_restore_timeout(now)
        late: list[Process] = [p for p in self.members.by_rank().values() if p.name not in self._attempt.restored]
        return [*self._blame_late(late, now, "did not finish restoring"), *self._fail(late, -1, None, now)]


class ComparesTheStopDeadlineInAnotherWay(Controller):
    """Once ours: `asked_at + limit` is past, `now - asked_at >= limit` is not. The deadline passed for ever."""

    def _late(self, now: float) -> list[Process]:
        return [process for process in super()._late(now) if now - process.asked_at >= self._attempt.stop_limit_seconds]


class SaysNothingAgain(Controller):
    """Once ours: what an agent had not passed on when it died was lost, and waited for until a deadline."""

    def _repeat_orders(self, now: float) -> list[Command]:  # noqa: ARG002
        return []


class SavesWithWhatWentWithTheAgent(Controller):
    """Once ours: the order to write a last checkpoint was said again to an agent that was restarted, though a dead
    rank's private state, which it relied on, had gone with its predecessor."""

    def _can_do_without_what_is_gone(self, save: Save) -> bool:  # noqa: ARG002
        return False


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


class TakesAShortSleepForNone(Controller):
    """Once ours: one that had slept until just after a deadline took itself for punctual, and did the same."""

    def expire(self, now: float) -> tuple[Command, ...]:
        if self._deadline is not None and now - self._deadline <= HEARING_SECONDS:
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
        if event.agent in self.hosts and self.job_stats.controller_restarts:
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
        self.job_stats.failure(None, "host lost", event.evidence, None, 0, self.generation, now)
        return self._fail([], -1, None, now)


class ForgetsTheParts(Controller):
    """A divided state is decided upon as if every rank held all of it."""

    def _lost_without(self, process: Process | None = None) -> bool:
        return not any(p.may_hold_state and p is not process for p in self.members.by_rank().values())

    def _advance(self, now: float) -> list[Command]:
        with replaced("require_every_part", lambda decision, shards: decision):  # noqa: ARG005
            return super()._advance(now)


class ForgetsThatItWentDown(Controller):
    """A recovery that goes back below what replicas hold begins again, and those who are not back yet count."""

    def _fall_back(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        out = super()._fall_back(reason, reports, now)
        self._fallback = msgspec.structs.replace(self._fallback, target=-1)
        return out


class TakesWhatIsUndoneForPrivateState(Controller):
    """Once ours: a rank died on the way down, before it had begun; its page still had versions that were undone."""

    def _private_versions(self, rank: int) -> frozenset[int]:
        return self.members.private_versions(rank)


class ForgetsWhoThrewItsPrivateStateAway(Controller):
    """Once ours: only of a dead rank it was asked what is left of its private state. A survivor that had begun to go
    down, and was then to copy from a replica that was there already, had none."""

    def _lost_private(self, reports: Sequence[ev.Stopped]) -> dict[int, frozenset[int]]:
        held = self.members.by_rank()
        return {rank: left for rank, left in super()._lost_private(reports).items() if held[rank].replacement}


class NamesBuddiesOfThoseWhoAreLeft(Controller):
    """Once ours: a controller that came back in a recovery named buddies though a rank had no process; whoever still
    waited for its first Begin counted by rank, and found itself nowhere."""

    def _buddies(self) -> tuple[int, ...]:
        held = self.members.by_rank()
        keys = [self.shards.key(rank) for rank in held]
        return choose_buddies(keys, [process.agent for process in held.values()]) if self.buddy_every else ()


class TakesARecalledSnapshotForACopy(Controller):
    """Once ours: what a lost rank had left in its buddy's memory differed from a survivor's state; the job ended."""

    def _on_restored(self, event: ev.Restored, now: float) -> list[Command]:
        if self._attempt.decision is not None:
            self._attempt.decision = msgspec.structs.replace(self._attempt.decision, recalled=())
        return super()._on_restored(event, now)


class TakesTheLivingForSnapshots(Controller):
    """Once ours: who had gone back already was named as a source of its snapshot, and had none."""

    def _advance(self, now: float) -> list[Command]:
        with replaced("has_gone_back", lambda *_: False):
            return super()._advance(now)

    def _fall_back(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        stood = [
            msgspec.structs.replace(r, snapshots=(*r.snapshots, ev.Snapshot(rank=r.rank, version=r.version)))
            if r.version == self._fallback.target and not r.blank and not r.torn
            else r
            for r in reports
        ]
        return super()._fall_back(reason, stood, now)


class KeepsToTheBuddies(Controller):
    """Once ours: if buddy memory was lost in the middle of going back to it, a newer checkpoint did not count."""

    def _fall_back(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        if self._fallback.is_under_way:
            reports = [
                msgspec.structs.replace(r, checkpoints=tuple(v for v in r.checkpoints if v <= self._fallback.target))
                for r in reports
            ]
        return super()._fall_back(reason, reports, now)


class KeepsTheNewest(Controller):
    """Once ours: a recovery kept the newest snapshots, of which some were in one memory only, and let go of older ones
    that the next death would have left whole.
    """

    def _worth_keeping(self, reports: Sequence[ev.Stopped]) -> int:
        found = newest_snapshots(reports, self.shards, self._unfinished) if self.buddy_every else None
        return -1 if found is None else found[0]


class CountsCopiesAsVotes(Controller):
    """A rank that was copied from others votes on whose state is right."""

    def _on_corruption(
        self,
        digests: Mapping[int, int | str],
        voters: Collection[int],  # noqa: ARG002
        version: int,
        noticed_ns: int,
        now: float,
        tensors: Sequence[str] = (),
    ) -> list[Command]:
        return super()._on_corruption(digests, digests, version, noticed_ns, now, tensors)


class TrustsWhatIsNewest(Controller):
    """If replicas differ and nobody can tell which is right, all go back to the newest snapshot or checkpoint."""

    def _fall_back(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        with replaced("newest_to_trust", lambda *_: None):
            return super()._fall_back(reason, reports, now)


class BlamesTheFirst(Controller):
    """If replicas differ and nobody can tell which is right, that of the lowest rank is."""

    def _distrust(self, what: str, version: int, noticed_ns: int, now: float) -> list[Command]:
        if not self.members.by_rank():
            return super()._distrust(what, version, noticed_ns, now)
        other = list(self.members.by_rank().values())[-1]
        self.job_stats.failure(
            other, "corruption", what, other.final_position, noticed_ns, self.generation, now, version
        )
        return [Kill(process=other.name, why=what), *self._fail([other], version, None, now)]


class IgnoresDifferences(Controller):
    """Ranks say that their states differ, and are left waiting."""

    def _on_state_differs(self, event: ev.StateDiffers, now: float) -> list[Command]:  # noqa: ARG002
        return []


class CountsEarlierCopiesAsVotes(Controller):
    """Once ours: a copy that was made before a recovery began again voted on whose state is right."""

    def _on_corruption(
        self,
        digests: Mapping[int, int | str],
        voters: Collection[int],
        version: int,
        noticed_ns: int,
        now: float,
        tensors: Sequence[str] = (),
    ) -> list[Command]:
        if self.stage is Stage.RESTORING and self._attempt.decision is not None:
            voters = [rank for rank in digests if rank not in self._attempt.decision.targets]
        return super()._on_corruption(digests, voters, version, noticed_ns, now, tensors)


class TakesOneRankForAMajority(Controller):
    """Once ours: if all the others were copied from one rank, that rank alone outvoted them, although it may be the one
    that changed since.
    """

    def _on_corruption(
        self,
        digests: Mapping[int, int | str],
        voters: Collection[int],
        version: int,
        noticed_ns: int,
        now: float,
        tensors: Sequence[str] = (),
    ) -> list[Command]:
        with replaced("outvoted", outvoted_by_one, "failing"):
            return super()._on_corruption(digests, voters, version, noticed_ns, now, tensors)


class SaysOnceThatTheLastIsToDie(Controller):
    """Once ours: after the last step, an order to kill that died with an agent was not given to its successor."""

    def _on_suspected(self, event: ev.ProcessSuspected, now: float) -> list[Command]:
        out = super()._on_suspected(event, now)
        for process in self.members.processes.values():
            process.doomed = False
        return out
