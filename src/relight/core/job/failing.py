"""A failure, in any stage from training on: one too many, or the next generation, in which all are asked to stop."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from relight.core.account.failure_log import describe
from relight.core.account.verdict import describe_doubts
from relight.core.job.attempts import Attempts
from relight.core.job.breaker import Breaker
from relight.core.job.job import Job, Stage
from relight.core.job.reserve import Reserve
from relight.core.job.saving import Saving
from relight.core.membership.members import Process
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, Kill, Notice
from relight.core.protocol.position import Phase
from relight.core.recovery.corruption import describe_difference, outvoted

# A collective that breaks is nearly always the echo of a death that the agent reports within milliseconds. Only if none
# is reported for this long is the network itself held to be the cause.
COLLECTIVE_GRACE_SECONDS = 0.25
MAX_CORRUPTIONS = 3  # of the same ranks


class Failing:
    """Take failed processes out of the job, and begin a recovery."""

    def __init__(self, job: Job, attempts: Attempts, reserve: Reserve, saving: Saving) -> None:
        self._job, self._attempts, self._reserve, self._saving = job, attempts, reserve, saving
        self.breaker = Breaker(job)
        self.recovery_step = -1  # the step that the recovery under way is about

    def fail(
        self,
        processes: list[Process],
        step: int,
        key: tuple[object, ...] | None,
        now: float,
        raised: ev.WorkerFailed | None = None,
        limit: int = 0,
    ) -> list[Command]:
        """Answer the failure that was recorded last: end the job, or open the next generation without `processes`."""
        job, last = self._job, self._job.job_stats.failures.last
        if job.stage is Stage.SAVING:
            return self._saving.lose(processes, now)
        if job.stage is Stage.TRAINING:
            self.recovery_step = step
        self.breaker.count_step(step)
        notices: list[Command] = []
        for process in processes:
            if not process.proven:
                notices += self._attempts.fail(process.spawned_at, last.evidence, now)
        self.breaker.count_alike(key)
        ending = self.breaker.verdict(step, key, limit)
        if not ending and any(not p.proven for p in processes) and (used_up := self._attempts.used_up()):
            ending = f"{used_up}; last: rank {last.rank}: {last.evidence}"
        if ending and raised is not None and raised.stands:
            return self._saving.give_up(ending, now, raised)  # its state is as good as any, and may be the last
        for process in processes:
            job.members.fail(process)
            process.failed_at_step = step
        if ending:
            return self._saving.give_up(ending, now, raised)
        return [*self.open_generation(now), *notices]

    def open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        """Begin a recovery, or begin it again: all stop, under a new number."""
        job = self._job
        if job.lost_without() and not job.has_fallback:
            return job.end(job.describe_loss(), now, job.last_traceback())
        last = job.job_stats.failures.last
        return [
            job.stop_everyone(last.evidence, now, stop_limit_seconds),
            Notice(why=describe(last), level="warning"),
            *self._reserve.fill_vacancies(now),
        ]

    @property
    def newest_step(self) -> int:
        """The step of a failure that cannot be asked for its step any more; -1: not known."""
        return self.recovery_step if self._job.stage is not Stage.TRAINING else -1

    def step_of(self, process: Process, step: int) -> int:
        """The step that a process failed in: a replacement that is not restored yet fails in the recovery's."""
        return self.recovery_step if process.replacement else step

    # --- code between two steps that made replicas differ ------------------------------------------------------
    def on_apart(self, version: int, now: float) -> list[Command]:
        """Ranks that went on alone between two steps differ: begin again, and have all follow one of them."""
        job = self._job
        job.went_apart = True
        evidence = f"the states of version {version} differ, since a collective between two steps was cut short"
        job.job_stats.failures.add(None, "communication", evidence, None, 0, job.generation, now, self.recovery_step)
        return self.open_generation(now)

    def on_alone(self, now: float) -> list[Command]:
        """Ranks wait in a collective between two steps that not all can join: let them go on alone, and ask again."""
        self._job.go_alone = True
        why = "not all ranks can join the collective between two steps that others wait in"
        return [self._job.stop_everyone(why, now), *self._reserve.fill_vacancies(now)]

    # --- replicas that differ -----------------------------------------------------------------------------------
    def on_corruption(
        self,
        digests: Mapping[int, int | str],
        voters: Collection[int],
        version: int,
        noticed_ns: int,
        now: float,
        tensors: Sequence[str] = (),
    ) -> list[Command]:
        """Replicas of a version differ: ranks that are outvoted have failed, and their state is never copied."""
        job, out = self._job, list[Command]()
        processes: list[Process] = []
        wrong: tuple[int, ...] = ()
        for part in job.shards.differing(digests):  # ranks that hold the same part of the state vote on it
            minority = outvoted(part, [rank for rank in voters if rank in part])
            if minority is None:
                doubts = describe_doubts(job.job_stats.doubts.found)
                difference = describe_difference(part, version, tensors, doubts=doubts)
                return self._distrust(difference, version, noticed_ns, now)
            right = len(part) - len(minority)
            evidence = f"its state of version {version} is not that of the other {right} ranks: memory was corrupted"
            wrong += minority
            for process in (job.members.by_rank()[rank] for rank in minority):
                position = msgspec.structs.replace(process.final_position, step=version, phase=Phase.BARRIER)
                job.job_stats.failures.add(process, "corruption", evidence, position, noticed_ns, job.generation, now)
                processes.append(process)
                out.append(Kill(process=process.name, why=evidence))
        # Again and again the same ranks: not memory, but a script whose ranks do not compute the same.
        return out + self.fail(processes, version, ("corruption", wrong), now, limit=MAX_CORRUPTIONS)

    def _distrust(self, difference: str, version: int, noticed_ns: int, now: float) -> list[Command]:
        """No majority tells which replica is right: fall back to a version from before, or end the job."""
        job, known = self._job, self._job.fallback
        if not job.has_fallback:
            return job.end(f"{difference}. {job.advice()}", now)
        first = min(version, known.differed_at) if known.distrusts else version
        job.fallback = msgspec.structs.replace(known, differed_at=first, difference=difference)
        job.job_stats.failures.add(None, "corruption", difference, None, noticed_ns, job.generation, now, version)
        return self.fail([], version, ("differs", version), now, limit=MAX_CORRUPTIONS)
