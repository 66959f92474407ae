"""Controllers with a planted bug: in each, one part of the production one differs in one decision."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import msgspec

from relight.core.controller import HEARING_SECONDS, PRODUCTION, Controller, ControllerSettings, Stage
from relight.core.job.draining import Draining
from relight.core.job.failing import Failing
from relight.core.job.saving import Saving
from relight.core.membership.members import Process
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, Kill, Restore, Save, Source
from relight.core.protocol.position import Phase
from relight.core.recovery.decision import Decision, Halt, decide
from relight.core.stages.agents import Agents
from relight.core.stages.finishing import Finishing
from relight.core.stages.processes import Processes
from relight.core.stages.repeating import Repeating
from relight.core.stages.restoring import Restoring
from relight.core.stages.stopping import Stopping
from relight.core.stages.training import Training
from relight.sim.planted.rules import (
    Private,
    intact_versions,
    make_decision,
    planted_rule,
)

Build = Callable[[ControllerSettings], Controller]


def controller_with(*planted: type) -> Build:
    """Build a controller in which these classes stand for the parts that they are derived from."""
    for kind in planted:
        if issubclass(kind, Controller):
            return kind
    kinds = {
        field.name: kind
        for kind in planted
        for field in fields(PRODUCTION)
        if issubclass(kind, getattr(PRODUCTION, field.name))
    }
    return partial(Controller, kinds=replace(PRODUCTION, **kinds))


class DecidesFromTheDeadRanksTag(Stopping):
    """A1, the published rule: in or after the optimizer, forward; before it, back. The dead rank's page decides."""

    def advance(self, now: float) -> list[Command]:
        with planted_rule(self._by_tag):
            return super().advance(now)

    def _by_tag(self, reports: Sequence[ev.Stopped], private: Private, world_size: int) -> Decision | Halt:
        members = self._job.members
        tags = [members.processes[names[-1]].final_position for names in members.predecessors.values()]
        if not tags or not intact_versions(reports):
            return decide(reports, private, world_size)
        base = min(intact_versions(reports))
        past = any(tag.phase is Phase.OPTIMIZER or tag.version > base for tag in tags)
        return make_decision(reports, world_size, base + past)


class DecidesBeforeAllArePaused(Stopping):
    """A2: takes the newest reports for the missing ones."""

    def advance(self, now: float) -> list[Command]:
        known = [report for report in self._job.attempt.stopped.values() if not report.blank]
        if self._job.stage is Stage.STOPPING and known:
            for rank, process in self._job.members.by_rank().items():
                guess = msgspec.structs.replace(known[-1], process=process.name, rank=rank, blank=process.replacement)
                self._job.attempt.stopped.setdefault(process.name, guess)
        return super().advance(now)


class DecidesFromStalePositions(Failing):
    """Reports from the generation before are good enough: where a rank stood, it stands."""

    def open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        before = dict(self._job.attempt.stopped)
        out = super().open_generation(now, stop_limit_seconds)
        if self._job.stage is Stage.STOPPING:
            self._job.attempt.stopped.update(before)
        return out


class UsesAGenerationTwice(Failing):
    """D1: the number goes up only when the number of failures is odd."""

    def open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        if self._job.job_stats.failures.count % 2 == 0 and self._job.stage is not Stage.STARTING:
            self._job.generation -= 1
        return super().open_generation(now, stop_limit_seconds)


class BelievesOldReports(Stopping):
    """A report of an older generation, as a restarted agent may repeat it, counts like a new one."""

    def on_stopped(self, event: ev.Stopped, now: float) -> list[Command]:
        return super().on_stopped(msgspec.structs.replace(event, generation=self._job.generation), now)


class BelievesOldRestores(Restoring):
    """A stale Restored counts as well."""

    def on_restored(self, event: ev.Restored, now: float) -> list[Command]:
        return super().on_restored(msgspec.structs.replace(event, generation=self._job.generation), now)


class BelievesOldEnds(Finishing):
    """A stale TrainingDone counts as well: a rank that was done, and had to go back, counts as done."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._before: dict[str, ev.TrainingDone] = {}

    def on_done(self, event: ev.TrainingDone, now: float) -> list[Command]:
        self._job.attempt.done.update(self._before)
        out = super().on_done(msgspec.structs.replace(event, generation=self._job.generation), now)
        self._before = dict(self._job.attempt.done)
        return out


class ResumesWithoutTheLast(Restoring):
    """The last rank will be restored soon enough."""

    def on_restored(self, event: ev.Restored, now: float) -> list[Command]:
        out = super().on_restored(event, now)
        missing = [p for p in self._job.members.by_rank().values() if p.name not in self._job.attempt.restored]
        if self._job.stage is Stage.RESTORING and len(missing) == 1 and self._job.settings.world_size > 2:
            process = missing[0]
            guess = msgspec.structs.replace(event, process=process.name, rank=process.rank)
            return [*out, *super().on_restored(guess, now)]
        return out


class GivesARankAwayTooSoon(Stopping):
    """A process that was declared failed is not awaited: it may still write, and its page may still change."""

    def advance(self, now: float) -> list[Command]:
        dying = self._job.members.dying
        self._job.members.dying = list  # type: ignore[method-assign]
        try:
            return super().advance(now)
        finally:
            self._job.members.dying = dying  # type: ignore[method-assign]


class ForgetsRestoredReplacements(Failing):
    """A defect of an earlier version: a replacement counted as a replica from Resume on, and not from the end of its
    copy.
    """

    def open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        for process in self._job.members.by_rank().values():
            process.may_hold_state = not process.replacement
        return super().open_generation(now, stop_limit_seconds)


class ForgetsThePredecessors(Failing):
    """Only the last holder of a rank is asked for its private state; it may never have got so far."""

    def open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        kept = {rank: names[-1:] for rank, names in self._job.members.predecessors.items()}
        self._job.members.predecessors.update(kept)
        return super().open_generation(now, stop_limit_seconds)


class IgnoresFrozenProcessesAtTheEnd(Processes):
    """A defect of an earlier version: no process was declared failed once training was done, and nothing else ended the
    wait.
    """

    def on_suspected(self, event: ev.ProcessSuspected, now: float) -> list[Command]:
        if self._job.stage is Stage.FINISHING:
            return []
        return super().on_suspected(event, now)


class IgnoresBrokenCollectives(Training):
    """A collective that breaks is taken for the echo of a death, also where none follows."""

    def on_collective_failed(self, event: ev.CollectiveFailed, now: float) -> list[Command]:  # noqa: ARG002
        return []


class BlamesEveryoneForASlowRestore(Restoring):
    """A defect of an earlier version: at the deadline everyone who was not restored had failed, and that was
    everyone."""

    def on_restore_timeout(self, now: float) -> list[Command]:
        if self._job.attempt.suspected_restore is not None:
            return super().on_restore_timeout(now)
        restored = self._job.attempt.restored
        late = [p for p in self._job.members.by_rank().values() if p.name not in restored]
        kills = self._saving.blame_late(late, now, "did not finish restoring")
        return [*kills, *self._failing.fail(late, -1, None, now)]


class ComparesTheStopDeadlineInAnotherWay(Saving):
    """A defect of an earlier version: `asked_at + limit` is past, `now - asked_at >= limit` is not. The deadline passed
    forever.
    """

    def late(self, now: float) -> list[Process]:
        limit = self._job.attempt.stop_limit_seconds
        return [process for process in super().late(now) if now - process.asked_at >= limit]


class SaysNothingAgain(Repeating):
    """A defect of an earlier version: what an agent had not passed on when it died was lost, and waited for until a
    deadline.
    """

    def to_agent(self, now: float) -> list[Command]:  # noqa: ARG002
        return []


class SavesWithWhatWentWithTheAgent(Saving):
    """A defect of an earlier version: the order to write a last checkpoint was said again to an agent that was
    restarted, though a dead rank's private state, which it relied on, had gone with its predecessor.
    """

    def _can_do_without_what_is_gone(self, save: Save) -> bool:  # noqa: ARG002
        return False


class TakesUnknownEndsForAlike(Processes):
    """A defect of an earlier version: two processes that ended unseen had "failed twice in the same place"."""

    def on_exited(self, event: ev.ProcessExited, now: float) -> list[Command]:
        known = event if event.exit_status is not None else msgspec.structs.replace(event, exit_status=999)
        return super().on_exited(known, now)


class WaitsForTheMemoryOfTheDead(Processes):
    """A failed process that is seen dying is not awaited any more, and neither is its page read again: but before."""

    def on_dying(self, event: ev.ProcessDying, now: float) -> list[Command]:
        position = msgspec.structs.replace(event.position, private_versions=(-1, -1))
        return super().on_dying(msgspec.structs.replace(event, position=position), now)


class Oversleeps(Controller):
    """A defect of an earlier version: a controller that had slept past a deadline killed who had answered while it
    slept.
    """

    def expire(self, now: float) -> tuple[Command, ...]:
        self._extended = self.job.deadline
        return super().expire(now)


class TakesAShortSleepForNone(Controller):
    """A defect of an earlier version: one that had slept until just after a deadline took itself for punctual, and did
    the same.
    """

    def expire(self, now: float) -> tuple[Command, ...]:
        if self.job.deadline is not None and now - self.job.deadline <= HEARING_SECONDS:
            self._extended = self.job.deadline
        return super().expire(now)


class ReusesAGenerationAfterItsRestart(Repeating):
    """D5 without a durable counter: the successor opens a generation under the number of the last one."""

    def on_controller_restarted(self, now: float) -> list[Command]:
        if self._job.stage in (Stage.STOPPING, Stage.RESTORING):
            self._job.generation -= 1
        return super().on_controller_restarted(now)


class SaysNothingAfterItsRestart(Repeating):
    """The successor waits for what the dead controller had ordered, whether it was sent or not."""

    def on_controller_restarted(self, now: float) -> list[Command]:
        super().on_controller_restarted(now)
        return []


class StartsOnSpares(Agents):
    """A defect of an earlier version: a spare that joined before a node took its ranks, and the node was the spare."""

    def on_joined(self, event: ev.AgentJoined, now: float) -> list[Command]:
        return super().on_joined(msgspec.structs.replace(event, spare=False), now)


class DrainsInTheMiddleOfAStep(Draining):
    """The ranks of a host that is drained are killed at once, and the others repeat their step."""

    def order(self) -> list[Command]:
        return [Kill(process=p.name, why="its host is drained") for p in self._job.leaving]


class TakesAFaultForALoss(Agents):
    """A host whose hardware has reported a fault counts as lost: its ranks fail at once, though they go on."""

    def on_faulty(self, event: ev.HostFaulty, now: float) -> list[Command]:
        return super().on_lost(ev.AgentLost(agent=event.agent, evidence=event.reason), now)


class GivesMachinesBackForEver(Agents):
    """A host on a machine that is to be avoided is given back however often the machine has come before."""

    def on_joined(self, event: ev.AgentJoined, now: float) -> list[Command]:
        self._job.hosts._returned.clear()
        return super().on_joined(event, now)


class GivesHostsBackTooSoon(Draining):
    """A defect of an earlier version: a host was given back while a standby there was being killed, and a recovery
    waited for its end.
    """

    def _occupied(self) -> set[str]:
        return {process.agent for process in self._job.leaving}


class TakesAnotherAgentForTheSame(Agents):
    """A defect of an earlier version: if agent and controller died together, the successor did not know that the agent
    was another one.
    """

    def on_joined(self, event: ev.AgentJoined, now: float) -> list[Command]:
        if event.agent in self._job.hosts and self._job.job_stats.controller_restarts:
            return []
        return super().on_joined(event, now)


class TrustsThePagesOfALostAgent(Agents):
    """A defect of an earlier version: a dead process's private state was still asked for when its agent, or its host,
    had died as well.
    """

    def _forget_pages(self, agent: str) -> None:
        pass


class WaitsForTheLostAtTheEnd(Agents):
    """A defect of an earlier version: if the last processes of a finished job were a lost host's, the job did not
    end."""

    def on_lost(self, event: ev.AgentLost, now: float) -> list[Command]:
        out = super().on_lost(event, now)
        if self._job.ended is not None and not self._job.ended.error:
            self._job.stage, self._job.ended = Stage.FINISHING, None
            return out[:-1]
        return out


class PlacesOnALostHost(Agents):
    """A host that is lost keeps its place on the list of those with room."""

    def on_lost(self, event: ev.AgentLost, now: float) -> list[Command]:
        remove = self._job.hosts.remove
        self._job.hosts.remove = str  # type: ignore[method-assign,assignment]
        try:
            return super().on_lost(event, now)
        finally:
            self._job.hosts.remove = remove  # type: ignore[method-assign]


class CopiesFromZombies(Stopping):
    """A rank's process on a lost host counts as a source, since it may live on there."""

    def advance(self, now: float) -> list[Command]:
        out = super().advance(now)
        return [self._with_zombies(command) if isinstance(command, Restore) else command for command in out]

    def _with_zombies(self, restore: Restore) -> Restore:
        processes = self._job.members.processes
        holders = [(rank, names[-1]) for rank, names in self._job.members.predecessors.items()]
        lost = [(rank, name) for rank, name in holders if processes[name].agent not in self._job.hosts]
        zombies = tuple(Source(rank=rank, address=name) for rank, name in lost)
        return msgspec.structs.replace(restore, sources=(*zombies, *restore.sources))


class DerivesWhateverIsLost(Stopping):
    """Private state that no process holds is taken to follow from rank and step, also where it does not."""

    def on_stopped(self, event: ev.Stopped, now: float) -> list[Command]:
        return super().on_stopped(msgspec.structs.replace(event, derivable=True), now)


class WaitsForALostHost(Agents):
    """The ranks of a lost host are asked to stop like all others: only the last deadline takes them out."""

    def on_lost(self, event: ev.AgentLost, now: float) -> list[Command]:
        if self._job.stage is not Stage.TRAINING:
            return super().on_lost(event, now)
        self._job.hosts.remove(event.agent)
        self._job.job_stats.failures.add(None, "host lost", event.evidence, None, 0, self._job.generation, now)
        return self._failing.fail([], -1, None, now)
