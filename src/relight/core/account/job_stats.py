"""The account of a job, for `report.json`: how far it got, its failures, recoveries and notices. Takes no decisions.

A controller keeps the newest only, so that its memory does not grow with the job. The journal has all of them: the
report at the end and the dashboard replay it with an account that keeps everything.
"""

import msgspec

from relight.core.account.doubts import Doubts
from relight.core.account.failure_log import FailureLog
from relight.core.account.recovery_log import RecoveryLog
from relight.core.account.report import JobReport
from relight.core.membership.members import Process
from relight.core.protocol import events as ev
from relight.core.protocol.commands import FallbackTier
from relight.core.protocol.fault import Fault
from relight.core.recovery.decision import Decision

KEPT_IN_ACCOUNT = 64  # failures, and as many recoveries
KEPT_NOTICES = 256


class JobStats:
    """Collects; `report()` gives the value."""

    def __init__(self, world_size: int, standbys: int, kept: int | None = None) -> None:
        """`kept`: the number of failures, and of recoveries, that are kept; None: all, and all notices."""
        self._world_size = world_size
        self._standbys = standbys
        self._kept = kept
        self.failures = FailureLog(kept)
        self.recoveries = RecoveryLog(world_size, self.failures, kept)
        self.doubts = Doubts(kept)
        self.notices: dict[str, None] = {}  # oldest first
        self._notice_count = 0
        self.struck: set[Fault] = set()  # planned faults that happened
        self.controller_restarts = 0
        self._end = 0.0
        self._until = 0
        self._began_at = 0
        self._version = 0  # the newest that any rank is known to have committed
        self._undone_in = 0  # the generation that last went back over finished versions: older reports do not count
        self._lineage = ""
        self._digest = ""
        self._cut = 0
        self._error = ""
        self._saved_version = -1
        self._saved_path = ""

    # --- the job ------------------------------------------------------------------------------------------------
    def started(self, now: float) -> None:
        """The first host joined."""
        self.failures.start = self._end = now

    def began(self, now: float, first: ev.TrainingEntered, digest: str) -> None:
        """Every rank reached its first step."""
        self._began_at = first.version
        self._until, self._digest, self._end = first.until, digest, now
        self.committed(first.version)

    def committed(self, version: int, generation: int | None = None) -> None:
        """A rank is known to have held this version in `generation`; None: in the newest."""
        if generation is None or generation >= self._undone_in:
            self._version = max(self._version, version)

    def decided(
        self,
        decision: Decision,
        replacements: list[Process],
        now: float,
        tier: FallbackTier = FallbackTier.REPLICA,
        undone: int = 0,
    ) -> None:
        """The target of the recovery under way was chosen; `undone`: finished versions that it goes back over."""
        recovery = self.recoveries.under_way
        if recovery is None:
            return
        if tier is not FallbackTier.REPLICA:
            self._version, self._undone_in = decision.target, recovery.generation
        self.committed(decision.target)
        failures = map(self.failures.find, recovery.failures)
        self.doubts.decided(failures, recovery.agreed, recovery.sound, decision.target, tier)
        self.recoveries.decided(decision, replacements, now, tier, undone)

    def finished(self, reports: list[ev.TrainingDone], digest: str, now: float) -> None:
        """Every rank committed its last step."""
        self._version, self._lineage = reports[0].version, reports[0].lineage
        self._digest, self._end = digest, now
        self._cut = max(r.cut_collectives for r in reports)
        self.doubts.finished(reports)
        self.recoveries.close()

    def saved(self, version: int, path: str) -> None:
        """A last checkpoint was written."""
        self._saved_version, self._saved_path = version, path

    def ended(self, error: str, now: float) -> None:
        """The job is over."""
        self._error, self._end = error, now
        self.recoveries.close()

    # --- notices ------------------------------------------------------------------------------------------------
    def notice(self, text: str) -> bool:
        """Keep a notice for the user. False if it was given before, perhaps by an earlier process of that rank."""
        if text in self.notices:
            return False
        self.notices[text] = None
        self._notice_count += 1
        if self._kept is not None and len(self.notices) > KEPT_NOTICES:
            del self.notices[next(iter(self.notices))]
        return True

    @property
    def forgot(self) -> bool:
        """True if more has happened than is kept here."""
        kept = (len(self.failures.newest), len(self.recoveries.newest), len(self.notices))
        return kept != (self.failures.count, self.recoveries.count, self._notice_count) or self.doubts.forgot

    # --- the value --------------------------------------------------------------------------------------------
    def report(self) -> JobReport:
        """Everything so far, of failures and recoveries those that are kept; the sums are of all."""
        failures, recoveries = self.failures, self.recoveries
        return msgspec.structs.replace(
            JobReport(job=""),
            wall_seconds=self._end - failures.start,
            world_size=self._world_size,
            standbys=self._standbys,
            steps=self._version,
            until=self._until,
            began_at=self._began_at,
            failures=tuple(failures.newest),
            recoveries=recoveries.reports(),
            notices=tuple(self.notices),
            steps_repeated=recoveries.repeated,
            moved_bytes=recoveries.moved_bytes,
            final_version=self._version,
            final_state_digest="" if self._error else self._digest,  # not compared since the first step
            final_lineage=self._lineage,
            time_lost_seconds=recoveries.lost_seconds,
            cut_collectives=self._cut,
            bits_as_undisturbed="" if self._error else self.doubts.verdict,
            doubts=self.doubts.found,
            controller_restarts=self.controller_restarts,
            error=self._error,
            saved_version=self._saved_version,
            saved_path=self._saved_path,
        )
