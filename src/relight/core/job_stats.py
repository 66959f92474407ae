"""The account of a job: each failure and each recovery with its stages, for `report.json`. Takes no decisions.

A controller keeps the newest only, so that its memory does not grow with the job. The journal has all of them: who
needs them (the report at the end, the dashboard) replays it with an account that forgets nothing.
"""

from collections.abc import Container
from dataclasses import dataclass, field

import msgspec

from relight.core import events as ev
from relight.core.commands import FallbackTier
from relight.core.decision import Decision, describe_target
from relight.core.doubts import Doubts
from relight.core.fault import Fault
from relight.core.members import Process
from relight.core.noticing import detect_seconds
from relight.core.position import Position
from relight.core.report import ENDED, FailureReport, JobReport, RecoveryReport, RecoveryStages

WORTH_SAYING_SECONDS = 0.1
KEPT_IN_ACCOUNT = 64  # failures, and as many recoveries
KEPT_NOTICES = 256


@dataclass
class _Open:
    """The recovery under way. Times are the controller's."""

    generation: int
    failures: list[int]
    since: float  # first failure noticed
    stop_sent: float
    detect_seconds: float | None = None  # of the first failure
    estimated: bool = False  # that is
    survivors_stopped: float = 0.0
    all_stopped: float = 0.0
    decided: float = 0.0
    restored: float = 0.0
    resumed: float = 0.0
    restarts: int = 0
    decision: Decision | None = None
    tier: FallbackTier = FallbackTier.REPLICA
    undone: int = 0  # finished versions that it goes back over
    replaced: tuple[int, ...] = ()
    replacement_kind: str = "none"
    pids: str = ""
    worked_on: int = 0  # newest step any survivor had started
    stop_seconds: float = 0.0
    progress: list[ev.RestoreProgress] = field(default_factory=list)
    forward_at: float = 0.0  # when the last rank began the forward of its first step
    redo_seconds: float = 0.0
    commits: int = 0
    wrote: set[int] = field(default_factory=set)
    torn: set[int] = field(default_factory=set)
    agreed: int = -1  # the newest version of which a survivor knows that all replicas held the same bits


class JobStats:
    """Collects; `report()` gives the value."""

    def __init__(self, world_size: int, standbys: int, kept: int | None = None) -> None:
        """`kept`: so many of the newest failures, and of the newest recoveries; None: all, and all notices."""
        self.world_size = world_size
        self.standbys = standbys
        self.failures: list[FailureReport] = []
        self.failure_count = 0  # with those that are forgotten; also the number of the newest
        self.unexplained: dict[str, FailureReport] = {}  # by process: seen dying, and not yet known how it ended
        self.recoveries: list[RecoveryReport] = []
        self.recovery_count = 0
        self._kept = kept
        self._answered = 0  # number of the newest failure that a recovery is about
        self.notices: dict[str, None] = {}  # oldest first
        self.notice_count = 0
        self.struck: set[Fault] = set()  # planned faults that happened
        self.controller_restarts = 0
        self._open: _Open | None = None
        self._start = 0.0
        self._end = 0.0
        self._until = 0
        self._began_at = 0
        self._version = 0  # the newest that any rank is known to have committed
        self._undone_in = 0  # generation that last went back over finished versions: what was before it, is no more
        self._lineage = ""
        self._digest = ""
        self._cut = 0
        self.doubts = Doubts(kept)
        self._error = ""
        self._saved_version = -1
        self._saved_path = ""
        self._lost_seconds = 0.0  # by recoveries so far, steps computed again included
        self._repeated = 0
        self._moved_bytes = 0

    # --- the job ----------------------------------------------------------------------------------------------
    def started(self, now: float) -> None:
        self._start = self._end = now

    def began(self, now: float, first: ev.TrainingEntered, digest: str) -> None:
        self._began_at = first.version
        self._until, self._digest, self._end = first.until, digest, now
        self.committed(first.version)

    def finished(self, reports: list[ev.TrainingDone], digest: str, now: float) -> None:
        self._version, self._lineage = reports[0].version, reports[0].lineage
        self._digest, self._end = digest, now
        self._cut = max(r.cut_collectives for r in reports)
        self.doubts.finished(reports)
        self._close()

    def committed(self, version: int, generation: int | None = None) -> None:
        """A rank is known to hold this version, which was so in `generation`; None: in the newest."""
        if generation is None or generation >= self._undone_in:
            self._version = max(self._version, version)

    def saved(self, version: int, path: str) -> None:
        self._saved_version, self._saved_path = version, path

    def notice(self, text: str) -> bool:
        """Something that people should read. False if it was said before, perhaps by who held that rank then."""
        if text in self.notices:
            return False
        self.notices[text] = None
        self.notice_count += 1
        if self._kept is not None and len(self.notices) > KEPT_NOTICES:
            del self.notices[next(iter(self.notices))]
        return True

    def ended(self, error: str, now: float) -> None:
        self._error, self._end = error, now
        self._close()

    # --- failures ---------------------------------------------------------------------------------------------
    def failure(
        self,
        process: Process | None,
        kind: str,
        evidence: str,
        position: Position | None,
        noticed_ns: int,
        generation: int,
        now: float,
        step: int = -1,
        phase: str = "",
        stack: str = "",
        waited_seconds: float = 0.0,
    ) -> None:
        """Record one failure; `process` is None if no rank is to blame. `waited_seconds`: see `detect_seconds`."""
        phase = phase or (position.phase.name if position else "")
        position = position or Position(step=step)
        unnoticed_seconds, how = detect_seconds(kind, position, noticed_ns, waited_seconds)
        idle = kind in ("hang", "frozen") and 0 < position.stamp_ns < noticed_ns
        self.failure_count += 1
        failure = FailureReport(
            number=self.failure_count,
            rank=-1 if process is None or process.rank is None else process.rank,
            process="" if process is None else process.name,
            kind=kind,
            stack=stack,
            step=position.step,
            phase=phase,
            evidence=evidence,
            generation=generation,
            noticed_seconds=now - self._start,
            detect_seconds=unnoticed_seconds,
            detect_evidence=how,
            idle_seconds=(noticed_ns - position.stamp_ns) / 1e9 if idle else None,
        )
        self.failures.append(failure)
        if kind == ENDED:
            self.unexplained[failure.process] = failure
        if self._kept is not None:
            del self.failures[: -self._kept]

    @property
    def forgot(self) -> bool:
        """Whether more has happened than is kept here."""
        known = (len(self.failures), len(self.recoveries), len(self.notices))
        return known != (self.failure_count, self.recovery_count, self.notice_count) or self.doubts.forgot

    def _find(self, number: int) -> FailureReport | None:
        """None: it is forgotten."""
        index = number - self.failure_count + len(self.failures) - 1
        return self.failures[index] if index >= 0 else None

    def amend(self, process: str, kind: str, evidence: str) -> FailureReport:
        """Now it is known how a process ended whose death had been seen."""
        failure = msgspec.structs.replace(self.unexplained.pop(process), kind=kind, evidence=evidence)
        if self._find(failure.number) is not None:
            self.failures[failure.number - self.failure_count - 1] = failure
        return failure

    def forget_unexplained(self, known: Container[str]) -> None:
        """Of processes that nobody knows any more: their ends will not be told."""
        self.unexplained = {name: failure for name, failure in self.unexplained.items() if name in known}

    def describe_failure(self, failure: FailureReport) -> str:
        """One line for people."""
        if failure.rank < 0:
            return f"failure {failure.number}: {failure.evidence}"
        return (
            f"failure {failure.number}: rank {failure.rank} ({failure.process}) in {failure.phase} of step "
            f"{failure.step}: {failure.evidence}"
        )

    def describe_recovery(self, now: float) -> str:
        """One line for people, when everyone was told to train on."""
        recovery = self._open
        if recovery is None or recovery.decision is None:
            return ""
        ranks = ", ".join(map(str, recovery.replaced))
        plural = "s" if len(recovery.replaced) > 1 else ""
        who = (
            f"rank{plural} {ranks} taken over by a {recovery.replacement_kind} (pid {recovery.pids}), " if ranks else ""
        )
        decision = recovery.decision
        unnoticed = recovery.detect_seconds or 0.0
        about = "about " if recovery.estimated else ""
        noticing = (
            f" ({about}{unnoticed:.3f} s of it until it was noticed)" if unnoticed >= WORTH_SAYING_SECONDS else ""
        )
        time = f"{unnoticed + now - recovery.since:.3f} s{noticing}"
        said = f"recovered in {time}: {who}{describe_target(decision.direction, decision.target)}"
        if recovery.tier is FallbackTier.REPLICA:
            return said
        steps = f"{recovery.undone} finished step{'s are' if recovery.undone != 1 else ' is'}"
        return f"{said} from the {recovery.tier}; {steps} computed again"

    # --- the recovery under way -------------------------------------------------------------------------------
    def stopping(self, generation: int, now: float) -> None:
        """A generation was opened for the newest failure."""
        if self._open is not None and self._open.resumed:
            self._close()
        if self._open is None:
            self._open = _Open(generation=generation, failures=[], since=now, stop_sent=now)
        else:
            self._open.restarts += 1
        recovery = self._open
        recovery.generation, recovery.stop_sent = generation, now
        recovery.survivors_stopped = recovery.all_stopped = now
        recovery.stop_seconds = 0.0
        recovery.progress.clear()
        if not recovery.failures:
            first = self._find(self._answered + 1)
            recovery.detect_seconds = None if first is None else first.detect_seconds
            recovery.estimated = first is not None and first.estimated
        recovery.failures += range(self._answered + 1, self.failure_count + 1)
        self._answered = self.failure_count

    def stopped(self, event: ev.Stopped, now: float) -> None:
        if self._open is None:
            return
        self._open.all_stopped = now
        if event.torn:
            self._open.torn.add(event.rank)
        if event.wrote:
            self._open.wrote.add(event.rank)
        if not event.blank:
            self._open.agreed = max(self._open.agreed, event.agreed)
            self._open.survivors_stopped = now
            self._open.worked_on = max(self._open.worked_on, event.step)
            self._open.stop_seconds = max(self._open.stop_seconds, event.stop_seconds)

    def decided(
        self,
        decision: Decision,
        replacements: list[Process],
        now: float,
        tier: FallbackTier = FallbackTier.REPLICA,
        undone: int = 0,
    ) -> None:
        if self._open is None:
            return
        self._open.tier, self._open.undone = tier, undone
        if tier is not FallbackTier.REPLICA:
            self._version, self._undone_in = decision.target, self._open.generation
        self.committed(decision.target)
        self._open.decided, self._open.decision = now, decision
        self.doubts.decided(map(self._find, self._open.failures), self._open.agreed, decision.target, tier)
        self._open.replaced = tuple(p.rank for p in replacements if p.rank is not None)
        kinds = {"fresh process" if p.fresh else "standby" for p in replacements}
        self._open.pids = ", ".join(str(p.pid) for p in replacements)
        self._open.replacement_kind = " and ".join(sorted(kinds)) or "none"

    @property
    def decided_at(self) -> float:
        """When the decision of the recovery under way was taken; 0.0 without one."""
        return 0.0 if self._open is None else self._open.decided

    def restored(self, event: ev.Restored, now: float) -> None:
        if self._open is not None:
            self._open.restored = now
            self._open.progress.append(event.progress)

    def resumed(self, now: float) -> None:
        if self._open is not None:
            self._open.resumed = now
            self._open.forward_at, self._open.redo_seconds, self._open.commits = now, 0.0, 0

    def step_resumed(self, event: ev.StepResumed, world_size: int, now: float) -> None:
        recovery = self._open
        if recovery is None or event.generation != recovery.generation or not recovery.resumed:
            return
        redo_seconds = (event.commit_ns - event.forward_ns) / 1e9
        recovery.redo_seconds = max(recovery.redo_seconds, redo_seconds)
        recovery.forward_at = max(recovery.forward_at, now - redo_seconds)
        recovery.commits += 1
        if recovery.commits == world_size:
            self._close()

    def _close(self) -> None:
        recovery, self._open = self._open, None
        if recovery is not None and recovery.decision is not None and recovery.resumed:
            done = self._recovery_report(recovery, recovery.decision)
            self.recoveries.append(done)
            self.recovery_count += 1
            self._lost_seconds += _lost_seconds(done)
            self._repeated += done.steps_repeated
            self._moved_bytes += done.moved_bytes
            if self._kept is not None:
                del self.recoveries[: -self._kept]

    def _recovery_report(self, recovery: _Open, decision: Decision) -> RecoveryReport:
        detect = recovery.detect_seconds
        resume = recovery.forward_at - recovery.resumed

        def slowest(name: str) -> float:
            return max((float(getattr(p, name)) for p in recovery.progress), default=0.0)

        repeated = int(decision.target <= recovery.worked_on and decision.direction == "back") + recovery.undone
        return RecoveryReport(
            number=self.recovery_count + 1,
            generation=recovery.generation,
            failures=tuple(recovery.failures),
            decision=decision.direction,
            target_version=decision.target,
            reason=decision.reason,
            survivors=tuple(r for r in range(self.world_size) if r not in recovery.replaced),
            replaced=recovery.replaced,
            replacement_kind=recovery.replacement_kind,
            sources=decision.sources if decision.targets else (),
            stages=RecoveryStages(
                detect_seconds=detect,
                stop_seconds=recovery.survivors_stopped - recovery.stop_sent,
                replace_seconds=recovery.all_stopped - recovery.survivors_stopped,
                decide_seconds=max(0.0, recovery.decided - recovery.all_stopped),
                finish_seconds=slowest("finish_seconds"),
                reform_seconds=slowest("reform_seconds"),
                copy_seconds=slowest("copy_seconds"),
                digest_seconds=slowest("digest_seconds"),
                rollback_seconds=slowest("rollback_seconds"),
                resume_seconds=resume,
                redo_seconds=recovery.redo_seconds,
                total_seconds=(detect or 0.0) + (recovery.resumed - recovery.since) + resume,
            ),
            steps_repeated=repeated,
            tier=recovery.tier,
            steps_undone=recovery.undone,
            moved_bytes=sum(p.copied_bytes for p in recovery.progress),
            restarts=recovery.restarts,
            wrote=tuple(sorted(recovery.wrote.difference(recovery.replaced))),
            torn=tuple(sorted(recovery.torn.difference(recovery.replaced))),
        )

    # --- the value --------------------------------------------------------------------------------------------
    def report(self) -> JobReport:
        """Everything so far, of failures and recoveries those that are kept; the sums are of all."""
        under_way: tuple[RecoveryReport, ...] = ()
        if self._open is not None and self._open.decision is not None and self._open.resumed:
            under_way = (self._recovery_report(self._open, self._open.decision),)
        return msgspec.structs.replace(
            JobReport(job=""),
            wall_seconds=self._end - self._start,
            world_size=self.world_size,
            standbys=self.standbys,
            steps=self._version,
            until=self._until,
            began_at=self._began_at,
            failures=tuple(self.failures),
            recoveries=(*self.recoveries, *under_way),
            notices=tuple(self.notices),
            steps_repeated=self._repeated + sum(r.steps_repeated for r in under_way),
            moved_bytes=self._moved_bytes + sum(r.moved_bytes for r in under_way),
            final_version=self._version,
            final_state_digest="" if self._error else self._digest,  # nobody has looked at it since the first step
            final_lineage=self._lineage,
            time_lost_seconds=self._lost_seconds + sum(map(_lost_seconds, under_way)),
            cut_collectives=self._cut,
            bits_as_undisturbed="" if self._error else self.doubts.verdict,
            doubts=self.doubts.found,
            controller_restarts=self.controller_restarts,
            error=self._error,
            saved_version=self._saved_version,
            saved_path=self._saved_path,
        )


def _lost_seconds(recovery: RecoveryReport) -> float:
    redone = recovery.stages.redo_seconds * recovery.steps_repeated
    return recovery.stages.total_seconds + redone
