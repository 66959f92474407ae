"""The failures of a job, for its report: each with its evidence, and the time until it was noticed."""

from collections.abc import Container

import msgspec

from relight.core.account.noticing import detect_seconds
from relight.core.account.report import ENDED, FailureReport
from relight.core.membership.members import Process
from relight.core.protocol.position import Position


class FailureLog:
    """The newest failures; the count is of all."""

    def __init__(self, kept: int | None) -> None:
        """`kept`: the number of failures that are kept; None: all."""
        self._kept = kept
        self.start = 0.0  # when the job began
        self.newest: list[FailureReport] = []
        self.count = 0  # also the number of the newest
        self.unexplained: dict[str, FailureReport] = {}  # by process: seen dying, and not yet known how it ended

    @property
    def last(self) -> FailureReport:
        """The newest failure. There must be one."""
        return self.newest[-1]

    def add(
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
        self.count += 1
        failure = FailureReport(
            number=self.count,
            rank=-1 if process is None or process.rank is None else process.rank,
            process="" if process is None else process.name,
            kind=kind,
            stack=stack,
            step=position.step,
            phase=phase,
            evidence=evidence,
            generation=generation,
            noticed_seconds=now - self.start,
            detect_seconds=unnoticed_seconds,
            detect_evidence=how,
            idle_seconds=(noticed_ns - position.stamp_ns) / 1e9 if idle else None,
        )
        self.newest.append(failure)
        if kind == ENDED:
            self.unexplained[failure.process] = failure
        if self._kept is not None:
            del self.newest[: -self._kept]

    def find(self, number: int) -> FailureReport | None:
        """The failure of this number; None if it is not kept any more."""
        index = number - self.count + len(self.newest) - 1
        return self.newest[index] if index >= 0 else None

    def amend(self, process: str, kind: str, evidence: str) -> FailureReport:
        """Explain the failure of a process that was seen dying, once it is known how it ended."""
        failure = msgspec.structs.replace(self.unexplained.pop(process), kind=kind, evidence=evidence)
        if self.find(failure.number) is not None:
            self.newest[failure.number - self.count - 1] = failure
        return failure

    def forget_unexplained(self, known: Container[str]) -> None:
        """Drop processes that are not `known` any more: their ends will not be reported."""
        self.unexplained = {name: failure for name, failure in self.unexplained.items() if name in known}


def describe(failure: FailureReport) -> str:
    """One line for people."""
    if failure.rank < 0:
        return f"failure {failure.number}: {failure.evidence}"
    return (
        f"failure {failure.number}: rank {failure.rank} ({failure.process}) in {failure.phase} of step "
        f"{failure.step}: {failure.evidence}"
    )
