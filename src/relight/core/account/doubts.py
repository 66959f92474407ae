"""Reasons to doubt that a job's bits are an undisturbed run's: what workers said, and what the account itself shows."""

from collections import Counter
from collections.abc import Iterable, Sequence

from relight.core.account.report import DoubtReport, FailureReport
from relight.core.account.verdict import verdict_of
from relight.core.protocol.commands import FallbackTier
from relight.core.protocol.events import TrainingDone

KEPT_DOUBTS = 64


class Doubts:
    """Collects them, each once."""

    def __init__(self, kept: int | None) -> None:
        """`kept`: None keeps all, else the first `KEPT_DOUBTS`."""
        self._limit = None if kept is None else KEPT_DOUBTS
        self._found: dict[tuple[int, str], DoubtReport] = {}  # by rank and reason
        self.forgot = False  # whether there were more than are kept here
        self._vouched: bool | None = None  # whether every rank gave its number of doubts; None: not all have ended

    def add(self, rank: int, step: int, reason: str, process: str = "") -> bool:
        """Add a reason; True if it is new. A rank may give it again, or a later holder of that rank."""
        key = rank, reason
        if key in self._found:
            return False
        if self._limit is not None and len(self._found) >= self._limit:
            self.forgot = True
            return False
        is_new = all(reason != known for _, known in self._found)
        self._found[key] = DoubtReport(rank=rank, process=process, step=step, reason=reason)
        return is_new

    def decided(
        self, failures: Iterable[FailureReport | None], agreed: int, sound: int, target: int, tier: FallbackTier
    ) -> None:
        """Note ranks that were outvoted, if they may have contributed gradients of a wrong state before that.

        Args:
            failures: those that the recovery answers; None is one that is forgotten.
            agreed: the newest version of which a survivor knows that all replicas held the same bits.
            sound: the newest version to which only replicas contributed that held the same bits.
            target: the version that everyone goes on from.
            tier: where its state comes from. On a fallback tier it is from before the ranks differed.
        """
        if tier is not FallbackTier.REPLICA or sound >= target:
            return
        since = f"since version {agreed}" if agreed >= 0 else "since the first step"
        for failure in failures:
            if failure is not None and failure.kind == "corruption" and failure.rank >= 0:
                reason = (
                    f"its memory was corrupted, and ranks had not compared their states {since}: what it contributed "
                    "to gradients from then on is in everybody's state. --verify-every 1 compares in each step"
                )
                self.add(failure.rank, target, reason)

    def finished(self, reports: Sequence[TrainingDone]) -> None:
        """All ranks ended with the same digests."""
        arrived = Counter(rank for rank, _ in self._found)
        for report in reports:
            missing = (report.doubts or 0) - arrived[report.rank]
            if missing > 0 and not self.forgot:
                self.add(report.rank, report.version, f"{missing} of its doubts got lost on the way to the controller")
        self._vouched = all(report.doubts is not None for report in reports)

    @property
    def verdict(self) -> str:
        """Return it once all ranks have ended, else "". A doubt of what code after the loop sees may come later."""
        return "" if self._vouched is None else verdict_of(self.found, vouched=self._vouched)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Each once, however many ranks gave it."""
        return tuple(dict.fromkeys(reason for _, reason in self._found))

    @property
    def found(self) -> tuple[DoubtReport, ...]:
        """The doubts, in the order in which they were reported."""
        return tuple(self._found.values())
