"""Controllers with a planted bug in fallbacks, or in what they make of replicas that differ."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from relight.core.controller import Stage
from relight.core.job.failing import Failing
from relight.core.job.job import Job
from relight.core.membership.members import Process
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, Kill
from relight.core.recovery.buddies import choose_buddies
from relight.core.recovery.fallback import newest_snapshots
from relight.core.stages.deciding import Deciding
from relight.core.stages.processes import Processes
from relight.core.stages.restoring import Restoring
from relight.core.stages.training import Training
from relight.sim.planted.rules import (
    outvoted_by_one,
    replaced,
)


class ForgetsTheParts(Job):
    """A divided state is decided upon as if every rank held all of it."""

    def lost_without(self, process: Process | None = None) -> bool:
        return not any(p.may_hold_state and p is not process for p in self.members.by_rank().values())


class DecidesWithoutTheParts(Deciding):
    """A divided state is decided upon as if every rank held all of it."""

    def decide(self, now: float) -> list[Command]:
        with replaced("require_every_part", lambda decision, shards: decision):  # noqa: ARG005
            return super().decide(now)


class ForgetsThatItWentDown(Deciding):
    """A recovery that goes back below what replicas hold begins again, and those who are not back yet count."""

    def _fall_back(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        out = super()._fall_back(reason, reports, now)
        self._job.fallback = msgspec.structs.replace(self._job.fallback, target=-1)
        return out


class TakesWhatIsUndoneForPrivateState(Deciding):
    """A defect of an earlier version: a rank died on the way down, before it had begun; its page still had versions
    that were undone.
    """

    def _private_versions(self, rank: int) -> frozenset[int]:
        return self._job.members.private_versions(rank)


class ForgetsWhoThrewItsPrivateStateAway(Deciding):
    """A defect of an earlier version: only of a dead rank it was asked what is left of its private state. A survivor
    that had begun to go down, and was then to copy from a replica that was there already, had none.
    """

    def _lost_private(self, reports: Sequence[ev.Stopped]) -> dict[int, frozenset[int]]:
        held = self._job.members.by_rank()
        return {rank: left for rank, left in super()._lost_private(reports).items() if held[rank].replacement}


class NamesBuddiesOfThoseWhoAreLeft(Job):
    """A defect of an earlier version: a controller that came back in a recovery named buddies though a rank had no
    process; a rank that still waited for its first Begin counted by rank, and found itself nowhere.
    """

    def buddies(self) -> tuple[int, ...]:
        held = self.members.by_rank()
        keys = [self.shards.key(rank) for rank in held]
        return choose_buddies(keys, [process.agent for process in held.values()]) if self.buddy_every else ()


class TakesARecalledSnapshotForACopy(Restoring):
    """A defect of an earlier version: what a lost rank had left in its buddy's memory differed from a survivor's state;
    the job ended.
    """

    def on_restored(self, event: ev.Restored, now: float) -> list[Command]:
        if self._job.attempt.decision is not None:
            self._job.attempt.decision = msgspec.structs.replace(self._job.attempt.decision, recalled=())
        return super().on_restored(event, now)


class TakesTheLivingForSnapshots(Deciding):
    """A defect of an earlier version: who had gone back already was named as a source of its snapshot, and had none."""

    def decide(self, now: float) -> list[Command]:
        with replaced("has_gone_back", lambda *_: False):
            return super().decide(now)

    def _fall_back(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        stood = [
            msgspec.structs.replace(r, snapshots=(*r.snapshots, ev.Snapshot(rank=r.rank, version=r.version)))
            if r.version == self._job.fallback.target and not r.blank and not r.torn
            else r
            for r in reports
        ]
        return super()._fall_back(reason, stood, now)


class KeepsToTheBuddies(Deciding):
    """A defect of an earlier version: if buddy memory was lost in the middle of going back to it, a newer checkpoint
    did not count.
    """

    def _fall_back(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        target = self._job.fallback.target
        if self._job.fallback.is_under_way:
            reports = [
                msgspec.structs.replace(r, checkpoints=tuple(v for v in r.checkpoints if v <= target)) for r in reports
            ]
        return super()._fall_back(reason, reports, now)


class KeepsTheNewest(Deciding):
    """A defect of an earlier version: a recovery kept the newest snapshots, of which some were in one memory only, and
    let go of older ones that the next death would have left whole.
    """

    def _worth_keeping(self, reports: Sequence[ev.Stopped]) -> int:
        found = newest_snapshots(reports, self._job.shards, self._unfinished) if self._job.buddy_every else None
        return -1 if found is None else found[0]


class CountsCopiesAsVotes(Failing):
    """A rank that was copied from others votes on whose state is right."""

    def on_corruption(
        self,
        digests: Mapping[int, int | str],
        voters: Collection[int],  # noqa: ARG002
        version: int,
        noticed_ns: int,
        now: float,
        tensors: Sequence[str] = (),
    ) -> list[Command]:
        return super().on_corruption(digests, digests, version, noticed_ns, now, tensors)


class TrustsWhatIsNewest(Deciding):
    """Goes back to the newest snapshot or checkpoint if replicas differ and no majority tells which is right."""

    def _fall_back(self, reason: str, reports: Sequence[ev.Stopped], now: float) -> list[Command]:
        with replaced("newest_to_trust", lambda *_: None):
            return super()._fall_back(reason, reports, now)


class BlamesTheFirst(Failing):
    """Trusts the lowest rank if replicas differ and no majority tells which is right."""

    def _distrust(self, what: str, version: int, noticed_ns: int, now: float) -> list[Command]:
        if not self._job.members.by_rank():
            return super()._distrust(what, version, noticed_ns, now)
        other = list(self._job.members.by_rank().values())[-1]
        self._job.job_stats.failures.add(
            other, "corruption", what, other.final_position, noticed_ns, self._job.generation, now, version
        )
        return [Kill(process=other.name, why=what), *self.fail([other], version, None, now)]


class IgnoresDifferences(Training):
    """Ranks say that their states differ, and are left waiting."""

    def on_state_differs(self, event: ev.StateDiffers, now: float) -> list[Command]:  # noqa: ARG002
        return []


class CountsEarlierCopiesAsVotes(Failing):
    """A defect of an earlier version: a copy that was made before a recovery began again voted on whose state is
    right."""

    def on_corruption(
        self,
        digests: Mapping[int, int | str],
        voters: Collection[int],
        version: int,
        noticed_ns: int,
        now: float,
        tensors: Sequence[str] = (),
    ) -> list[Command]:
        if self._job.stage is Stage.RESTORING and self._job.attempt.decision is not None:
            voters = [rank for rank in digests if rank not in self._job.attempt.decision.targets]
        return super().on_corruption(digests, voters, version, noticed_ns, now, tensors)


class TakesOneRankForAMajority(Failing):
    """A defect of an earlier version: if all the others were copied from one rank, that rank alone outvoted them,
    although it may be the one that changed since.
    """

    def on_corruption(
        self,
        digests: Mapping[int, int | str],
        voters: Collection[int],
        version: int,
        noticed_ns: int,
        now: float,
        tensors: Sequence[str] = (),
    ) -> list[Command]:
        with replaced("outvoted", outvoted_by_one, "job.failing"):
            return super().on_corruption(digests, voters, version, noticed_ns, now, tensors)


class SaysOnceThatTheLastIsToDie(Processes):
    """A defect of an earlier version: after the last step, an order to kill that died with an agent was not given to
    its successor.
    """

    def on_suspected(self, event: ev.ProcessSuspected, now: float) -> list[Command]:
        out = super().on_suspected(event, now)
        for process in self._job.members.processes.values():
            process.doomed = False
        return out
