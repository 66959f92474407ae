"""The lines of a job's journal, as events for programs. Pure."""

import datetime
import math
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from relight.chaos.plan import describe_fault
from relight.core.account.report import ENDED, FailureReport
from relight.core.controller import Controller, ControllerSettings
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Begin, EndJob, Notice, Restore, Resume, Stop
from relight.server.records.journal import JournalHeader, JournalLine, decode_line
from relight.watch import events as out
from relight.wire.settings import JobSettings, part_of
from relight.wire.status import PublishStatus, StatusLine

Kind = TypeVar("Kind", bound=out.Event)


class EventFeed:
    """Turns the lines of a journal into events, in their order."""

    def __init__(self) -> None:
        self._settings: JobSettings | None = None
        self._core: Controller
        self._now = 0.0
        self._dated = (datetime.datetime.fromtimestamp(0, datetime.UTC), 0.0)  # a reading of both clocks at once
        self._failures = 0  # that were reported
        self._unexplained: list[FailureReport] = []  # of these, as reported: how the process ended is not known
        self._recoveries = 0
        self.ended = False  # there will be no more
        self._statuses: deque[StatusLine] = deque()  # not reported yet
        self._published: dict[str, tuple[int, int, str]] = {}  # by process: updates, version and error, as reported
        self._begun = 0  # the newest generation that was ordered to train

    def take(self, line: bytes) -> Iterator[out.Event]:
        """Events of one line. Raises msgspec.DecodeError if it is not understood."""
        if self._settings is None:
            yield self._start(msgspec.json.decode(line, type=JournalHeader))
        else:
            yield from self._take(decode_line(line))

    def add_status(self, line: StatusLine) -> None:
        """Add a line of `status.jsonl`, before the lines of the journal that follow it; it is reported in its turn."""
        self._statuses.append(line)

    def flush(self) -> Iterator[out.Event]:
        """Events of all that was added: no line of the journal is older."""
        return self._of_statuses(math.inf)

    def _of_statuses(self, until: float) -> Iterator[out.Event]:
        while self._statuses and self._statuses[0].now <= until and self._settings is not None and not self.ended:
            line = self._statuses.popleft()
            status = line.status
            if not isinstance(status, PublishStatus) or status.total_bytes:  # an update that is under way
                continue
            before, now = self._published.get(status.process), (status.updates, status.version, status.error)
            self._published[status.process] = now
            if before == now or status.version < 0:
                continue
            self._now = max(self._now, line.now)
            yield out.WeightsPublished(
                **self._common(),
                version=status.version,
                engines={engine.name: engine.version for engine in status.engines},
                dropped=status.dropped,
                error=status.error,
                update_seconds=round(status.update_seconds, 6),
            )

    def _start(self, header: JournalHeader) -> out.Event:
        self._settings = settings = header.settings
        self._core = Controller(part_of(ControllerSettings, settings), full_account=True)
        self._dated = datetime.datetime.fromisoformat(header.wall), 0.0
        return out.JobStarted(
            **self._common(),
            script=settings.script,
            world_size=settings.world_size,
            nodes=settings.nodes,
            standbys=settings.standbys,
        )

    def _common(self) -> dict[str, Any]:
        assert self._settings is not None
        return {
            "time": (self._dated[0] + datetime.timedelta(seconds=self._now - self._dated[1])).isoformat(
                timespec="microseconds"
            ),
            "seconds": round(self._now, 6),
            "job": self._settings.job,
            "generation": self._core.generation,
        }

    def _take(self, line: JournalLine) -> Iterator[out.Event]:
        is_end = isinstance(line.command, EndJob)
        yield from self._of_statuses(math.inf if is_end else line.now)
        self._now = max(self._now, line.now)
        if line.wall:
            self._dated = datetime.datetime.fromisoformat(line.wall), line.now
        if line.event is not None:
            self._core.handle(line.event, line.now)
            yield from self._of_event(line.event)
            yield from self._of_job_stats()
        elif line.expired:
            self._core.expire(line.now)
            yield from self._of_job_stats()
        elif line.note:
            yield out.NoticeSaid(**self._common(), level="warning", text=line.note)
        elif isinstance(line.command, EndJob) and not self.ended:
            yield from self._of_job_stats(is_over=True)
            yield self._end(line.command)
            self.ended = True
        elif isinstance(line.command, Notice):
            yield out.NoticeSaid(**self._common(), level=line.command.level, text=line.command.why)
        elif line.command is not None:
            yield from self._of_order(line.command)

    def _of_event(self, event: ev.Event) -> Iterator[out.Event]:
        common = self._common()
        match event:
            case ev.AgentJoined():
                yield out.HostJoined(**common, host=event.agent)
            case ev.AgentLost():
                yield out.HostLost(**common, host=event.agent, evidence=event.evidence)
            case ev.ProcessStarted():
                rank, host = self._place(event.process)
                yield out.ProcessStarted(**common, process=event.process, rank=rank, host=host, pid=event.pid)
            case ev.ProcessExited():
                rank, host = self._place(event.process)
                yield out.ProcessEnded(
                    **common,
                    process=event.process,
                    rank=rank,
                    host=host,
                    exit_status=event.exit_status,
                    evidence=event.evidence,
                )
            case ev.StandbyReady():
                yield out.StandbyReady(**common, process=event.process, host=self._place(event.process)[1])
            case ev.FaultStruck():
                yield out.FaultInjected(**common, process=event.process, fault=describe_fault(event.fault))
            case ev.BitsDoubted():
                rank, step, reason = event.rank, event.step, event.reason
                yield out.BitsDoubted(**common, rank=rank, process=event.process, step=step, reason=reason)
            case ev.ControllerRestarted():
                yield out.ControllerRestarted(**common)

    def _place(self, name: str) -> tuple[int | None, str]:
        process = self._core.members.processes.get(name)
        return (None, "") if process is None else (process.rank, process.agent)

    def _of_order(self, order: msgspec.Struct) -> Iterator[out.Event]:
        common = self._common()
        match order:
            case Begin() if not self._begun:
                self._begun = order.generation
                yield out.TrainingStarted(**common, until=self._core.job.until)
            case Stop():
                yield out.RecoveryStarted(**common, reason=order.why)
            case Restore():
                yield out.RecoveryDecided(
                    **common,
                    target_version=order.target,
                    sources=tuple(source.rank for source in order.sources) if order.targets else (),
                    targets=order.targets,
                    reason=order.why,
                )
            case Resume() if order.generation > self._begun:  # a successor of a dead controller says it again
                self._begun = order.generation
                yield out.TrainingResumed(**common)

    def _of_job_stats(self, *, is_over: bool = False) -> Iterator[out.Event]:
        """Failures and recoveries that the job's account did not have before."""
        job_stats, common = self._core.job_stats, self._common()
        for failure in job_stats.failures.newest[self._failures :]:
            self._failures += 1
            if failure.kind == ENDED:
                self._unexplained.append(failure)
            yield _as_reported(out.Failure, failure, {**common, "generation": failure.generation})
        for reported in list(self._unexplained):
            failure = job_stats.failures.newest[reported.number - 1]
            if failure is not reported:
                self._unexplained.remove(reported)
                yield _as_reported(out.FailureExplained, failure, common)
        recoveries = self._core.report().recoveries if is_over else job_stats.recoveries.newest
        for recovery in recoveries[self._recoveries :]:
            self._recoveries += 1
            yield _as_reported(out.RecoveryFinished, recovery, self._common())

    def _end(self, command: EndJob) -> out.Event:
        report = self._core.report()
        return out.JobEnded(
            **self._common(),
            error=command.error,
            steps=report.steps,
            until=report.until,
            failures=len(report.failures),
            recoveries=len(report.recoveries),
            steps_repeated=report.steps_repeated,
            time_lost_seconds=report.time_lost_seconds,
            state_digest=report.final_state_digest,
            bits_as_undisturbed=report.bits_as_undisturbed,
            doubts=tuple(f"rank {doubt.rank} in step {doubt.step}: {doubt.reason}" for doubt in report.doubts),
        )


def _as_reported(kind: type[Kind], report: msgspec.Struct, common: dict[str, Any]) -> Kind:
    """Make an event of this kind with what is common to all events, and with the report's fields of the same names."""
    alike = (name for name in kind.__struct_fields__ if name in report.__struct_fields__)
    return kind(**{**{name: getattr(report, name) for name in alike}, **common})
