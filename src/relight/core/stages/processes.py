"""Events about one process, in any stage: it ends, it is suspected, its script raised an exception."""

import msgspec

from relight.core.account.report import ENDED
from relight.core.job.attempts import Attempts
from relight.core.job.failing import Failing
from relight.core.job.job import Job, Stage
from relight.core.job.reserve import MAX_EQUAL_ERRORS, Reserve
from relight.core.job.saving import Saving
from relight.core.membership.members import Process
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, Kill, Notice
from relight.core.stages.finishing import Finishing
from relight.core.stages.starting import Starting
from relight.core.stages.stopping import Stopping

STANDBY_PROVEN_SECONDS = 60.0
MAX_ABORTS = 5  # at one step, of any ranks
ABORTED = -6  # the exit status after SIGABRT


class Processes:
    """Ranks and standbys that fail."""

    def __init__(
        self,
        job: Job,
        attempts: Attempts,
        reserve: Reserve,
        starting: Starting,
        saving: Saving,
        failing: Failing,
        stopping: Stopping,
        finishing: Finishing,
    ) -> None:
        self._job, self._attempts, self._reserve, self._starting = job, attempts, reserve, starting
        self._saving, self._failing, self._stopping, self._finishing = saving, failing, stopping, finishing

    # --- ends ---------------------------------------------------------------------------------------------------
    def on_dying(self, event: ev.ProcessDying, now: float) -> list[Command]:
        """A process can run nothing any more: answer now instead of when its memory is freed.

        Not outside training, where there is no hurry; nor if the job ends by it, since its exit says why.
        """
        job = self._job
        process = job.members.processes.get(event.process)
        if process is None or process.gone or process.rank is None:
            return []
        if not process.alive or job.stage in (Stage.STARTING, Stage.FINISHING):
            return []
        if not process.failed and job.lost_without(process) and not job.has_fallback:
            return []
        process.gone = True
        process.final_position = event.position
        if process.failed:
            return self._stopping.advance(now)
        kind, evidence = ("slow", process.leaving) if process.leaving else (ENDED, "its process ended")
        job.job_stats.failures.add(process, kind, evidence, event.position, event.noticed_ns, job.generation, now)
        step = self._failing.step_of(process, event.position.step)
        return self._failing.fail([process], step, None, now)

    def on_exited(self, event: ev.ProcessExited, now: float) -> list[Command]:
        """A process has ended."""
        job = self._job
        process = job.members.processes.get(event.process)
        if process is None:
            return []
        if not process.alive:
            return self._on_found_private(process, event, now)
        job.members.end(process)
        if process.rank is None:  # a job may lose a standby a day, and never a rank
            job.members.forget(process)
        process.final_position = event.position
        explanation = self._explain(process, event, now) if process.name in job.job_stats.failures.unexplained else []
        if job.stage is Stage.FINISHING:
            return explanation + self._finishing.on_exit(process, event, now)
        if process.failed:  # declared failed before; its death was awaited
            return explanation + self._stopping.advance(now)
        if process.rank is None:
            return self._on_standby_lost(process, event.evidence, now)
        if job.stage is Stage.STARTING:
            return self._starting.on_exit(process, event, now)
        step = self._failing.step_of(process, event.position.step)
        kind, evidence = ("slow", process.leaving) if process.leaving else (_kind_of_exit(event), event.evidence)
        key = None if process.leaving else _likeness(event, kind, process.rank, step)
        job.job_stats.failures.add(process, kind, evidence, event.position, event.noticed_ns, job.generation, now)
        return self._failing.fail([process], step, key, now, limit=_limit_of(event))

    def _on_found_private(self, process: Process, event: ev.ProcessExited, now: float) -> list[Command]:
        """The successor of an agent reports an end that it has not seen: private state may lie with its neighbours.

        What the dead agent said of the process arrives late, and describes a page that may be gone.
        """
        knows = event.exit_status is None and max(event.position.private_versions) >= 0
        if not knows or max(process.final_position.private_versions) >= 0:
            return []
        process.final_position = event.position
        return self._stopping.advance(now)

    def _explain(self, process: Process, event: ev.ProcessExited, now: float) -> list[Command]:
        """A process that was seen dying is dead, and it is known how it ended."""
        job, breaker = self._job, self._failing.breaker
        failure = job.job_stats.failures.amend(process.name, _kind_of_exit(event), event.evidence)
        out: list[Command] = [Notice(why=f"failure {failure.number}: its process {event.evidence}", level="warning")]
        step = process.failed_at_step  # not the page's: that of a replacement may say nothing yet, and is always alike
        key = _likeness(event, failure.kind, failure.rank, step)
        if key is None:
            return out
        breaker.count_alike(key)
        ending = breaker.verdict(step, key, _limit_of(event))
        return out + (self._saving.give_up(ending, now) if ending and job.stage is not Stage.SAVING else [])

    # --- suspicions and exceptions ------------------------------------------------------------------------------
    def on_suspected(self, event: ev.ProcessSuspected, now: float) -> list[Command]:
        """The detector holds a process to be frozen or hung: kill it."""
        job = self._job
        process = job.members.processes.get(event.process)
        if process is None or not process.alive or process.failed:
            return []
        kill = Kill(process=process.name, why=event.evidence)
        if job.stage is Stage.FINISHING:
            process.doomed = True
            return [kill]  # its death then ends the job with an error
        if process.rank is None:
            job.members.fail(process)
            return [kill, *self._on_standby_lost(process, event.evidence, now)]
        if job.stage is Stage.STARTING:
            job.members.fail(process)
            return [kill, *self._starting.restart(f"rank {process.rank}: {event.evidence}", now)]
        job.job_stats.failures.add(
            process,
            event.kind,
            event.evidence,
            event.position,
            event.noticed_ns,
            job.generation,
            now,
            stack=event.stack,
            waited_seconds=event.stopped_seconds,
        )
        step = self._failing.step_of(process, event.position.step)
        key = ("hang", process.rank, step) if event.kind == "hang" else None
        return [kill, *self._failing.fail([process], step, key, now)]

    def on_worker_failed(self, event: ev.WorkerFailed, now: float) -> list[Command]:
        """The script raised an exception."""
        job = self._job
        process = job.members.processes.get(event.process)
        if process is None or not process.alive or process.failed:
            return []
        job.tracebacks[event.process] = event
        if event.kind == "usage" and process.rank is not None:
            return job.end(f"rank {event.rank}: {event.summary}", now, event)
        if process.rank is None or job.stage in (Stage.STARTING, Stage.FINISHING):
            return []  # its exit tells the rest
        if job.stage is Stage.SAVING and event.stands:
            return []  # like the others it is paused, and is asked
        position = msgspec.structs.replace(process.final_position, step=event.step)
        seen_at = f" ({event.place}; logs/rank-{process.rank}.log)" if event.place else ""
        evidence = event.summary + seen_at
        job.job_stats.failures.add(
            process, "exception", evidence, position, event.noticed_ns, job.generation, now, phase=event.phase
        )
        kill = Kill(process=process.name, why=f"it raised {event.summary}")
        # Code after an undone attempt sees a block that did not end: it raises in all survivors, and not once the step
        # is computed again.
        key = None if event.after_undone else ("exception", event.step, event.summary)
        out = self._failing.fail([process], event.step, key, now, event)
        return out if job.is_member(process.name) else [kill, *out]

    # --- standbys -----------------------------------------------------------------------------------------------
    def _on_standby_lost(self, process: Process, evidence: str, now: float) -> list[Command]:
        job, reserve = self._job, self._reserve
        if process.ready and now - process.ready_at > STANDBY_PROVEN_SECONDS:
            self._attempts.succeed()  # it waited long enough to show that standbys as such work
            reserve.forget_errors()
        raised = job.tracebacks.pop(process.name, None)
        what = f"{evidence} ({raised.summary})" if raised else evidence
        out: list[Command] = [Notice(why=f"standby {process.name} {what}", level="warning")]
        if raised is not None:
            out += reserve.note_error(raised.summary)
        out += self._attempts.fail(process.spawned_at, f"standby {process.name} {what}", now)
        vacant = job.members.vacant(job.settings.world_size) if job.stage is Stage.STOPPING else ()
        if vacant and not job.members.standbys():
            ending = self._attempts.used_up()
            if reserve.is_useless:
                ending = f"the script raised the same in {MAX_EQUAL_ERRORS} processes"
            if ending:
                ranks = ", ".join(map(str, vacant))
                return out + self._saving.give_up(f"{ending} before one could take rank {ranks}: {what}", now, raised)
        out += reserve.top_up(now)
        return out + self._stopping.advance(now)


def _likeness(event: ev.ProcessExited, kind: str, rank: int | None, step: int) -> tuple[object, ...] | None:
    """Return a key that is the same for ends which show one bug, in the script or a library.

    The same exit code of a rank at a step is one key, and so is SIGABRT of any rank at a step: gloo aborts one rank or
    another where ranks call different collectives. None: a process that any other signal has ended shows no bug.
    """
    if event.exit_status is None or (event.exit_status < 0 and not _has_aborted(event)):
        return None
    return ("aborted", step) if _has_aborted(event) else (kind, rank, step, event.exit_status)


def _has_aborted(event: ev.ProcessExited) -> bool:
    """Return whether a process has most likely ended itself, as libraries do where something is wrong in them."""
    return event.exit_status == ABORTED


def _limit_of(event: ev.ProcessExited) -> int:
    """Return how many such ends at one step end the job; 0: as many as the settings say."""
    return MAX_ABORTS if _has_aborted(event) else 0


def _kind_of_exit(event: ev.ProcessExited) -> str:
    if "out-of-memory" in event.evidence:
        return "out of memory"
    return "killed" if (event.exit_status or 0) < 0 else "exited"
