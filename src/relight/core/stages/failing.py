"""A failure, whoever noticed it: one too many, or the next generation, in which everybody is asked to stand still."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from relight.core import events as ev
from relight.core.commands import Command, Kill, Notice
from relight.core.corruption import describe_difference, outvoted
from relight.core.members import Process
from relight.core.position import Phase
from relight.core.report import ENDED
from relight.core.stages.saving import Saving
from relight.core.stages.state import Stage

# A collective that breaks is nearly always the echo of a death that the agent reports within milliseconds. Only
# if none is reported for this long is the network itself held to be the cause.
COLLECTIVE_GRACE_SECONDS = 0.25
MAX_CORRUPTIONS = 3  # of the same ranks
MAX_BROKEN_COLLECTIVES = 5  # in one step, while every process lives
MAX_OWN_FAILURES_PER_STEP = 10  # exceptions, hangs, broken collectives: what the script may be the cause of
# What strikes a process from outside. However often it does, a replacement may live: see core/backoff.py.
FROM_OUTSIDE = frozenset({ENDED, "killed", "exited", "out of memory", "frozen", "slow", "host lost"})


class Failing(Saving):
    """In any stage from training on."""

    def _fail(
        self,
        processes: list[Process],
        step: int,
        key: tuple[object, ...] | None,
        now: float,
        raised: ev.WorkerFailed | None = None,
        limit: int = 0,
    ) -> list[Command]:
        """Take failed processes out, unless it is one failure too many; then open the next generation."""
        if self.stage is Stage.SAVING:
            return self._lose(processes, now)
        if self.stage is Stage.TRAINING:
            self._recovery_step = step
        if self.settings.max_failures_per_step is not None or self.job_stats.failures[-1].kind not in FROM_OUTSIDE:
            self._failures_at_step.add(step)
        said: list[Command] = []
        for process in processes:
            if not process.proven:
                said += self._note_failed_attempt(process.spawned_at, self.job_stats.failures[-1].evidence, now)
        if key is not None:
            self._identical.add(key)
        ending = self._breaker(step, key, limit or self.settings.max_identical_errors)
        if not ending and any(not process.proven for process in processes) and (used_up := self._attempts_used_up()):
            ending = f"{used_up}; last: rank {self.job_stats.failures[-1].rank}: {self.job_stats.failures[-1].evidence}"
        if ending and raised is not None and raised.stands:
            return self._give_up(ending, now, raised)  # its state is as good as any, and may be the last
        for process in processes:
            self.members.fail(process)
            process.failed_at_step = step
        if ending:
            return self._give_up(ending, now, raised)
        return [*self._open_generation(now), *said]

    def _breaker(self, step: int, key: tuple[object, ...] | None, limit: int) -> str:
        """Why it is useless to go on, or an empty string."""
        last = self.job_stats.failures[-1]
        where = f"rank {last.rank} in {last.phase} of step {last.step}" if last.rank >= 0 else "all ranks"
        if key is not None and self._identical[key] >= limit:
            return f"{where}: {last.evidence} ({limit} times in the same place, so it is a bug, not a failure)"
        if self.settings.max_failures is not None and self.failures > self.settings.max_failures:
            return f"{self.failures} failures, more than --max-failures {self.settings.max_failures}; last {where}"
        at_most = self.settings.max_failures_per_step
        at_most = MAX_OWN_FAILURES_PER_STEP if at_most is None else at_most
        if step >= 0 and self._failures_at_step[step] > at_most:
            return f"step {step} failed {self._failures_at_step[step]} times; last: {where}: {last.evidence}"
        return ""

    def _on_corruption(
        self,
        digests: Mapping[int, int | str],
        voters: Collection[int],
        version: int,
        noticed_ns: int,
        now: float,
        tensors: Sequence[str] = (),
    ) -> list[Command]:
        """Replicas of a version differ: those that are outvoted have failed. Nothing of theirs is copied from."""
        out: list[Command] = []
        processes: list[Process] = []
        wrong: tuple[int, ...] = ()
        for part in self.shards.differing(digests):  # those who hold the same part of the state vote on it
            minority = outvoted(part, [rank for rank in voters if rank in part])
            if minority is None:
                return self._distrust(describe_difference(part, version, tensors), version, noticed_ns, now)
            right = len(part) - len(minority)
            evidence = f"its state of version {version} is not that of the other {right} ranks: memory was corrupted"
            wrong += minority
            for process in (self.members.by_rank()[rank] for rank in minority):
                position = msgspec.structs.replace(process.final_position, step=version, phase=Phase.BARRIER)
                self.job_stats.failure(process, "corruption", evidence, position, noticed_ns, self.generation, now)
                processes.append(process)
                out.append(Kill(process=process.name, why=evidence))
        # Again and again the same ranks: not memory, but a script whose ranks do not compute the same.
        return out + self._fail(processes, version, ("corruption", wrong), now, limit=MAX_CORRUPTIONS)

    def _distrust(self, what: str, version: int, noticed_ns: int, now: float) -> list[Command]:
        """Nobody can tell which replica is right: back to before it, if a fallback tier can; else the job ends."""
        if not self._has_fallback:
            return self._end(f"{what}. {self._advice()}", now)
        known = self._fallback
        first = min(version, known.differed_at) if known.distrusts else version
        self._fallback = msgspec.structs.replace(known, differed_at=first, difference=what)
        self.job_stats.failure(None, "corruption", what, None, noticed_ns, self.generation, now, version)
        return self._fail([], version, ("differs", version), now, limit=MAX_CORRUPTIONS)

    def _open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        """A failure, wherever it struck: from the top, under a new number."""
        if self._lost_without() and not self._has_fallback:
            return self._end(self._all_lost(), now, self._last_traceback())
        last = self.job_stats.failures[-1]
        return [
            self._stop_everyone(last.evidence, now, stop_limit_seconds),
            Notice(why=self.job_stats.describe_failure(last), level="warning"),
            *self._fill_vacancies(now),
        ]

    def _all_lost(self) -> str:
        last = self.job_stats.failures[-1]
        held = [rank for rank, p in self.members.by_rank().items() if p.may_hold_state]
        what = self.shards.lost(held) or "every replica of the state is lost"
        return f"{what}; last: rank {last.rank} in {last.phase} of step {last.step}: {last.evidence}. {self._advice()}"
