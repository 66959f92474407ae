"""Values that the controller replaces whole, so that nothing of one recovery is left over in the next. Pure."""

from dataclasses import dataclass, field, replace

import msgspec

from relight.core import events as ev
from relight.core.commands import Save
from relight.core.decision import Decision


@dataclass(slots=True)
class RecoveryAttempt:
    """Reports of one generation: one attempt to recover, and the training that follows it.

    Each Stop begins a new one. That of the first generation has no recovery in it.
    """

    stop_limit_seconds: float = 0.0  # for each rank to answer Stop
    stopped: dict[str, ev.Stopped] = field(default_factory=dict)  # by process, as the others
    decision: Decision | None = None
    restored: dict[str, ev.Restored] = field(default_factory=dict)
    suspected_restore: ev.RestoreFailed | None = None  # the first; most often the echo of a death
    suspected_collective: ev.CollectiveFailed | None = None  # the same of training
    done: dict[str, ev.TrainingDone] = field(default_factory=dict)

    def copy(self) -> "RecoveryAttempt":
        """An equal one that may change by itself."""
        return replace(self, stopped=self.stopped.copy(), restored=self.restored.copy(), done=self.done.copy())


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """The reason to go below replicas, and how far an unfinished recovery went; it outlives single attempts."""

    target: int = -1  # the version that all were ordered back to
    newest_finished: int = -1  # when the first of these orders was given
    differed_at: int = -1  # a version of which replicas held different bits, and no majority was right
    difference: str = ""  # the same in words

    @property
    def is_under_way(self) -> bool:
        """Whether all were ordered back to a buddy's or a checkpoint's version, and have not resumed."""
        return self.target >= 0

    @property
    def distrusts(self) -> bool:
        """Whether replicas are not trusted."""
        return self.differed_at >= 0


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """A job that must end after a last checkpoint."""

    error: str = ""
    raised: ev.WorkerFailed | None = None  # the script's own exception, if that is the reason
    order: Save | None = None  # once it is known what can be written
