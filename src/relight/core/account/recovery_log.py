"""The recoveries of a job, for its report: each with its stages. Takes no decisions."""

from dataclasses import dataclass, field

from relight.core.account.failure_log import FailureLog
from relight.core.account.report import RecoveryReport, RecoveryStages
from relight.core.membership.members import Process
from relight.core.protocol import events as ev
from relight.core.protocol.commands import FallbackTier
from relight.core.recovery.decision import Decision, describe_target

WORTH_SAYING_SECONDS = 0.1


@dataclass
class Recovery:
    """A recovery under way. Times are the controller's."""

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
    sound: int = -1  # the newest version to which no other replicas contributed, as far as a survivor knows


class RecoveryLog:
    """The newest recoveries, and the one under way; the sums are of all."""

    def __init__(self, world_size: int, failures: FailureLog, kept: int | None) -> None:
        """`kept`: the number of recoveries that are kept; None: all."""
        self._world_size = world_size
        self._failures = failures
        self._kept = kept
        self._answered = 0  # number of the newest failure that a recovery is about
        self.under_way: Recovery | None = None
        self.newest: list[RecoveryReport] = []
        self.count = 0
        self._lost_seconds = 0.0  # by recoveries so far, steps computed again included
        self._repeated = 0
        self._moved_bytes = 0

    # --- stages -------------------------------------------------------------------------------------------------
    def stopping(self, generation: int, now: float) -> None:
        """A generation was opened for the newest failure."""
        if self.under_way is not None and self.under_way.resumed:
            self.close()
        if self.under_way is None:
            self.under_way = Recovery(generation=generation, failures=[], since=now, stop_sent=now)
        else:
            self.under_way.restarts += 1
        recovery = self.under_way
        recovery.generation, recovery.stop_sent = generation, now
        recovery.survivors_stopped = recovery.all_stopped = now
        recovery.stop_seconds = 0.0
        recovery.progress.clear()
        if not recovery.failures:
            first = self._failures.find(self._answered + 1)
            recovery.detect_seconds = None if first is None else first.detect_seconds
            recovery.estimated = first is not None and first.estimated
        recovery.failures += range(self._answered + 1, self._failures.count + 1)
        self._answered = self._failures.count

    def stopped(self, event: ev.Stopped, now: float) -> None:
        """A rank is paused."""
        if self.under_way is None:
            return
        self.under_way.all_stopped = now
        if event.torn:
            self.under_way.torn.add(event.rank)
        if event.wrote:
            self.under_way.wrote.add(event.rank)
        if not event.blank:
            self.under_way.agreed = max(self.under_way.agreed, event.agreed)
            self.under_way.sound = max(self.under_way.sound, event.sound)
            self.under_way.survivors_stopped = now
            self.under_way.worked_on = max(self.under_way.worked_on, event.step)
            self.under_way.stop_seconds = max(self.under_way.stop_seconds, event.stop_seconds)

    def decided(
        self,
        decision: Decision,
        replacements: list[Process],
        now: float,
        tier: FallbackTier = FallbackTier.REPLICA,
        undone: int = 0,
    ) -> None:
        """The target was chosen; `undone`: finished versions that it goes back over."""
        if self.under_way is None:
            return
        recovery = self.under_way
        recovery.decided, recovery.decision = now, decision
        recovery.tier, recovery.undone = tier, undone
        recovery.replaced = tuple(p.rank for p in replacements if p.rank is not None)
        kinds = {"fresh process" if p.fresh else "standby" for p in replacements}
        recovery.pids = ", ".join(str(p.pid) for p in replacements)
        recovery.replacement_kind = " and ".join(sorted(kinds)) or "none"

    @property
    def decided_at(self) -> float:
        """The time of the decision of the recovery under way; 0.0 without one."""
        return 0.0 if self.under_way is None else self.under_way.decided

    def restored(self, event: ev.Restored, now: float) -> None:
        """A rank holds the target version."""
        if self.under_way is not None:
            self.under_way.restored = now
            self.under_way.progress.append(event.progress)

    def resumed(self, now: float) -> None:
        """Every rank was ordered to train on."""
        if self.under_way is not None:
            self.under_way.resumed = now
            self.under_way.forward_at, self.under_way.redo_seconds, self.under_way.commits = now, 0.0, 0

    def step_resumed(self, event: ev.StepResumed, now: float) -> None:
        """A rank has committed its first step; with the last one the recovery is over."""
        recovery = self.under_way
        if recovery is None or event.generation != recovery.generation or not recovery.resumed:
            return
        redo_seconds = (event.commit_ns - event.forward_ns) / 1e9
        recovery.redo_seconds = max(recovery.redo_seconds, redo_seconds)
        recovery.forward_at = max(recovery.forward_at, now - redo_seconds)
        recovery.commits += 1
        if recovery.commits == self._world_size:
            self.close()

    def close(self) -> None:
        """Keep the recovery under way, if training has resumed."""
        recovery, self.under_way = self.under_way, None
        if recovery is not None and recovery.decision is not None and recovery.resumed:
            done = self._recovery_report(recovery, recovery.decision)
            self.newest.append(done)
            self.count += 1
            self._lost_seconds += _lost_seconds(done)
            self._repeated += done.steps_repeated
            self._moved_bytes += done.moved_bytes
            if self._kept is not None:
                del self.newest[: -self._kept]

    def _recovery_report(self, recovery: Recovery, decision: Decision) -> RecoveryReport:
        detect = recovery.detect_seconds
        resume = recovery.forward_at - recovery.resumed

        def slowest(name: str) -> float:
            return max((float(getattr(p, name)) for p in recovery.progress), default=0.0)

        repeated = int(decision.target <= recovery.worked_on and decision.direction == "back") + recovery.undone
        return RecoveryReport(
            number=self.count + 1,
            generation=recovery.generation,
            failures=tuple(recovery.failures),
            decision=decision.direction,
            target_version=decision.target,
            reason=decision.reason,
            survivors=tuple(r for r in range(self._world_size) if r not in recovery.replaced),
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

    def describe(self, now: float) -> str:
        """One line for people, when all ranks are ordered to train on."""
        recovery = self.under_way
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

    # --- sums ---------------------------------------------------------------------------------------------------
    def resumed_reports(self) -> tuple[RecoveryReport, ...]:
        """The report of the recovery under way, if training has resumed."""
        recovery = self.under_way
        if recovery is None or recovery.decision is None or not recovery.resumed:
            return ()
        return (self._recovery_report(recovery, recovery.decision),)

    def reports(self) -> tuple[RecoveryReport, ...]:
        """The newest recoveries, oldest first."""
        return (*self.newest, *self.resumed_reports())

    @property
    def repeated(self) -> int:
        """Steps that were computed again."""
        return self._repeated + sum(r.steps_repeated for r in self.resumed_reports())

    @property
    def moved_bytes(self) -> int:
        """Bytes that were copied."""
        return self._moved_bytes + sum(r.moved_bytes for r in self.resumed_reports())

    @property
    def lost_seconds(self) -> float:
        """Time that recoveries took, steps computed again included."""
        return self._lost_seconds + sum(map(_lost_seconds, self.resumed_reports()))


def _lost_seconds(recovery: RecoveryReport) -> float:
    redone = recovery.stages.redo_seconds * recovery.steps_repeated
    return recovery.stages.total_seconds + redone
