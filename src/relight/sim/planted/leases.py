"""Tenures with a planted bug: two controllers act at the same moment."""

from relight.core.lease import TERM, Record, Stage, Tenure


class ActsUntilItIsTold(Tenure):
    """A holder that was paused acts when it wakes up, since it was not yet told that its time is over."""

    def may_act(self, now: float) -> bool:  # noqa: ARG002
        return self.stage is Stage.HOLDING


class CountsFromTheAnswer(Tenure):
    """A holder acts for its whole duration after the answer to its write, which may have come late."""

    def take_success(self, version: str, now: float) -> None:
        super().take_success(version, now)
        self._until, self.stage = now + self.duration_seconds, Stage.HOLDING


class WaitsForTheHolderNotTheVersion(Tenure):
    """A process takes over once it has known the same holder for the duration, though that one renews."""

    def take_record(self, record: Record, now: float) -> None:
        known, since = self.holder, self._seen_at
        super().take_record(record, now)
        if known == record.holder:
            self._seen_at = since


class BelievesItsOwnWrite(Tenure):
    """A write without an answer counts as one that succeeded."""

    def take_failure(self, now: float) -> None:
        if self._version:
            self._until, self.stage = self._sent_at + self.duration_seconds * TERM, Stage.HOLDING
        super().take_failure(now)


LEASES = (ActsUntilItIsTold, CountsFromTheAnswer, WaitsForTheHolderNotTheVersion, BelievesItsOwnWrite)
