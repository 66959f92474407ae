"""What is heard of one process, in any stage: it ends, it is suspected, its script raised."""

import msgspec

from relight.core import events as ev
from relight.core.commands import Command, Kill, Notice
from relight.core.members import Process
from relight.core.report import ENDED
from relight.core.stages.finishing import Finishing
from relight.core.stages.reserve import MAX_EQUAL_ERRORS
from relight.core.stages.starting import Starting
from relight.core.stages.state import Stage
from relight.core.stages.stopping import Stopping

STANDBY_PROVEN_SECONDS = 60.0


class Processes(Starting, Stopping, Finishing):
    """Ranks and standbys."""

    def _on_dying(self, event: ev.ProcessDying, now: float) -> list[Command]:
        """Do not wait until its memory is freed. Outside training there is no hurry."""
        process = self.members.processes.get(event.process)
        if process is None or process.gone or process.rank is None:
            return []
        if not process.alive or self.stage in (Stage.STARTING, Stage.FINISHING):
            return []
        if not process.failed and self._lost_without(process) and not self._has_fallback:
            return []  # the end of the job; then better with the reason, which comes with its exit
        process.gone = True
        process.final_position = event.position
        if process.failed:
            return self._advance(now)
        kind, evidence = ("slow", process.leaving) if process.leaving else (ENDED, "its process ended")
        self.job_stats.failure(process, kind, evidence, event.position, event.noticed_ns, self.generation, now)
        return self._fail([process], self._step_of(process, event.position.step), None, now)

    def _on_exited(self, event: ev.ProcessExited, now: float) -> list[Command]:
        process = self.members.processes.get(event.process)
        if process is None:
            return []
        if not process.alive:
            return self._on_left_behind(process, event, now)
        self.members.end(process)
        if process.rank is None:  # a job may lose a standby a day, and never a rank
            self.members.forget(process)
        process.final_position = event.position
        explanation = self._explain(process, event, now) if process.name in self.job_stats.unexplained else []
        if self.stage is Stage.FINISHING:
            return explanation + self._on_exit_after_training(process, event, now)
        if process.failed:  # declared failed before; its death was awaited
            return explanation + self._advance(now)
        if process.rank is None:
            return self._on_standby_lost(process, event.evidence, now)
        if self.stage is Stage.STARTING:
            return self._on_exit_before_training(process, event, now)
        step = self._step_of(process, event.position.step)
        if process.leaving:
            evidence, noticed_ns = process.leaving, event.noticed_ns
            self.job_stats.failure(process, "slow", evidence, event.position, noticed_ns, self.generation, now)
            return self._fail([process], step, None, now)
        kind = _kind_of_exit(event)
        key = (kind, process.rank, step, event.exit_status) if _ended_by_itself(event) else None
        self.job_stats.failure(process, kind, event.evidence, event.position, event.noticed_ns, self.generation, now)
        return self._fail([process], step, key, now)

    def _on_left_behind(self, process: Process, event: ev.ProcessExited, now: float) -> list[Command]:
        """The successor of its agent, which has not seen how it ended, says so again: perhaps what it left lies with
        others of that host. What the dead agent said of it comes late, and is of a page that may be gone."""
        knows = event.exit_status is None and max(event.position.private_versions) >= 0
        if not knows or max(process.final_position.private_versions) >= 0:
            return []
        process.final_position = event.position
        return self._advance(now)

    def _explain(self, process: Process, event: ev.ProcessExited, now: float) -> list[Command]:
        """A process that was seen dying is dead, and it is known how it ended."""
        failure = self.job_stats.amend(process.name, _kind_of_exit(event), event.evidence)
        out: list[Command] = [Notice(why=f"failure {failure.number}: its process {event.evidence}", level="warning")]
        if not _ended_by_itself(event):
            return out
        step = process.failed_at_step  # not the page's: that of a replacement may say nothing yet, and is always alike
        key = (failure.kind, failure.rank, step, event.exit_status)
        self._identical.add(key)
        ending = self._breaker(step, key, self.settings.max_identical_errors)
        return out + (self._give_up(ending, now) if ending and self.stage is not Stage.SAVING else [])

    def _on_suspected(self, event: ev.ProcessSuspected, now: float) -> list[Command]:
        process = self.members.processes.get(event.process)
        if process is None or not process.alive or process.failed:
            return []
        kill = Kill(process=process.name, why=event.evidence)
        if self.stage is Stage.FINISHING:
            process.doomed = True
            return [kill]  # its death then ends the job with an error
        if process.rank is None:
            self.members.fail(process)
            return [kill, *self._on_standby_lost(process, event.evidence, now)]
        if self.stage is Stage.STARTING:
            self.members.fail(process)
            return [kill, *self._restart_startup(f"rank {process.rank}: {event.evidence}", now)]
        position, noticed_ns = event.position, event.noticed_ns
        self.job_stats.failure(
            process,
            event.kind,
            event.evidence,
            position,
            noticed_ns,
            self.generation,
            now,
            stack=event.stack,
            waited_seconds=event.stopped_seconds,
        )
        step = self._step_of(process, event.position.step)
        key = ("hang", process.rank, step) if event.kind == "hang" else None
        return [kill, *self._fail([process], step, key, now)]

    def _on_worker_failed(self, event: ev.WorkerFailed, now: float) -> list[Command]:
        process = self.members.processes.get(event.process)
        if process is None or not process.alive or process.failed:
            return []
        self._tracebacks[event.process] = event
        if event.kind == "usage" and process.rank is not None:
            return self._end(f"rank {event.rank}: {event.summary}", now, event)
        if process.rank is None or self.stage in (Stage.STARTING, Stage.FINISHING):
            return []  # its exit tells the rest
        if self.stage is Stage.SAVING and event.stands:
            return []  # like the others it stands still, and is asked
        position = msgspec.structs.replace(process.final_position, step=event.step)
        seen_at = f" ({event.place}; logs/rank-{process.rank}.log)" if event.place else ""
        evidence = event.summary + seen_at
        self.job_stats.failure(
            process, "exception", evidence, position, event.noticed_ns, self.generation, now, phase=event.phase
        )
        kill = Kill(process=process.name, why=f"it raised {event.summary}")
        out = self._fail([process], event.step, ("exception", event.step, event.summary), now, event)
        return out if self._is_member(process.name) else [kill, *out]

    def _on_standby_lost(self, process: Process, evidence: str, now: float) -> list[Command]:
        if process.ready and now - process.ready_at > STANDBY_PROVEN_SECONDS:
            self._note_success()  # it waited long enough to show that standbys as such work
            self._standby_errors.clear()
        raised = self._tracebacks.pop(process.name, None)
        what = f"{evidence} ({raised.summary})" if raised else evidence
        out: list[Command] = [Notice(why=f"standby {process.name} {what}", level="warning")]
        if raised is not None:
            self._standby_errors.add(raised.summary)
            if self._standby_errors[raised.summary] == MAX_EQUAL_ERRORS:
                text = f"no more standbys are started: the script raised the same in {MAX_EQUAL_ERRORS} of them"
                out.append(Notice(why=text, level="warning"))
        out += self._note_failed_attempt(process.spawned_at, f"standby {process.name} {what}", now)
        vacant = self.members.vacant(self.settings.world_size) if self.stage is Stage.STOPPING else ()
        if vacant and not self.members.standbys():
            ending = self._attempts_used_up()
            if self._standbys_are_useless:
                ending = f"the script raised the same in {MAX_EQUAL_ERRORS} processes"
            if ending:
                ranks = ", ".join(map(str, vacant))
                return out + self._give_up(f"{ending} before one could take rank {ranks}: {what}", now, raised)
        out += self._top_up_standbys(now)
        return out + self._advance(now)


def _ended_by_itself(event: ev.ProcessExited) -> bool:
    """With a code, twice the same of which at one step are a bug. Who is killed, by whatever, says nothing of that."""
    return event.exit_status is not None and event.exit_status >= 0


def _kind_of_exit(event: ev.ProcessExited) -> str:
    if "out-of-memory" in event.evidence:
        return "out of memory"
    return "killed" if (event.exit_status or 0) < 0 else "exited"
