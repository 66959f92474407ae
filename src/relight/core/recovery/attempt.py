"""Values that the controller replaces whole, so that nothing of one recovery is left over in the next. Pure."""

from dataclasses import dataclass, field, replace

import msgspec

from relight.core.protocol import events as ev
from relight.core.protocol.commands import Save
from relight.core.recovery.decision import Decision


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


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """A job that must end after a last checkpoint."""

    error: str = ""
    raised: ev.WorkerFailed | None = None  # the script's own exception, if that is the reason
    order: Save | None = None  # once it is known what can be written
