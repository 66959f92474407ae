"""Actions of a worker: what its drivers carry out, in order. A driver reads what it needs from the worker's value."""

import msgspec


class Action(msgspec.Struct, frozen=True):
    """One thing to do. Unless noted, the main thread does it."""


class GoOnAlone(Action, frozen=True):
    """Give the collective between two steps that this rank waits in its own value, and run the code after it."""


class CloseGeneration(Action, frozen=True):
    """Break connections, cancel copies, withdraw what is offered. The link thread does it, at once."""


# --- reports ------------------------------------------------------------------------------------------------------
class ReportEntered(Action, frozen=True):
    """Report TrainingEntered."""


class ReportReady(Action, frozen=True):
    """Report StandbyReady."""


class ReportBrokenCollective(Action, frozen=True):
    """Report CollectiveFailed."""


class ReportDifference(Action, frozen=True):
    """Report StateDiffers."""


class ReportStatus(Action, frozen=True):
    """Report Stopped, with `Worker.status()`."""


class ReportRestored(Action, frozen=True):
    """Report Restored."""


class ReportRestoreFailure(Action, frozen=True):
    """Report RestoreFailed."""

    evidence: str


class ReportSaved(Action, frozen=True):
    """Report Saved."""

    path: str
    error: str


class ReportResumed(Action, frozen=True):
    """Report StepResumed: the first commit after a recovery."""


class ReportDone(Action, frozen=True):
    """Report TrainingDone."""


# --- start, steps and end -----------------------------------------------------------------------------------------
class TakeRank(Action, frozen=True):
    """Become the rank that was assigned."""


class AssignBuddies(Action, frozen=True):
    """Take over from Begin or Resume which rank keeps whose snapshots, and which ranks write checkpoints."""

    buddies: tuple[int, ...]
    writers: tuple[tuple[str, int], ...]
    keep: int = -1  # the version whose snapshots must stay for now


class OfferStep(Action, frozen=True):
    """Give the next step to the loop; copy for snapshots and checkpoints that are due."""


class KeepPrivate(Action, frozen=True):
    """Keep the rank-private state of the next version beside the page."""


class KeepPrivateAnew(Action, frozen=True):
    """Keep the rank-private state of this version again: it may have changed after the barrier."""


class Doubt(Action, frozen=True):
    """Report BitsDoubted: the bits may not be those of an undisturbed run."""

    reason: str


class ShowPrepared(Action, frozen=True):
    """Say on the page that this rank is prepared."""


class WithdrawPrepared(Action, frozen=True):
    """Take back that this rank is prepared, and the rank-private state of the next version, before ranks agree."""


class EnterBarrier(Action, frozen=True):
    """Enter the barrier's all-reduce."""


class FinishStep(Action, frozen=True):
    """Finish the step without other ranks: the barrier counts as passed."""


class ConfirmVersion(Action, frozen=True):
    """Let engines answer with the published version: all ranks hold it."""


class BeginWrite(Action, frozen=True):
    """Say on the page that a write is under way, and write."""


class Commit(Action, frozen=True):
    """Drop the pre-images and say on the page which version is here."""


class Release(Action, frozen=True):
    """Publish and save the final version, and run to the end of the script."""


# --- a recovery ---------------------------------------------------------------------------------------------------
class LeaveGroups(Action, frozen=True):
    """Detach from the groups of the old generation."""


class BeginForming(Action, frozen=True):
    """Begin to form the groups of the new generation, beside the main thread."""


class AwaitCopies(Action, frozen=True):
    """Wait until nothing reads the state any more that a snapshot is made of."""


class RollBack(Action, frozen=True):
    """Undo the writes of the interrupted step, from pre-images."""


class Copy(Action, frozen=True):
    """Copy the target version from a replica or from a reader of the checkpoint, over what is here."""


class TakeResults(Action, frozen=True):
    """Get from another rank what the collectives between two steps gave that this rank has not completed."""


class Offer(Action, frozen=True):
    """Serve this rank's state to those that copy."""


class DiscardUndone(Action, frozen=True):
    """Forget what is kept of versions after the target: snapshots, publications, private state beside the page."""


class RecallSnapshot(Action, frozen=True):
    """Take the target version from this rank's own snapshot."""


class FetchSnapshot(Action, frozen=True):
    """Take the target version from a snapshot in another rank's memory."""


class ReadCheckpoint(Action, frozen=True):
    """Read this rank's part of the checkpoint of the target version."""


class ClaimVersion(Action, frozen=True):
    """Say on the page that this rank holds the target version and its private state, whole."""


class AwaitGroups(Action, frozen=True):
    """Wait until the new groups are formed."""


class OpenGeneration(Action, frozen=True):
    """Attach the new groups: collectives go through them."""


class DiscardDistrusted(Action, frozen=True):
    """Remove checkpoints of this version and later ones: they may hold corrupted state."""

    version: int


class SavePart(Action, frozen=True):
    """Write this rank's part of the last checkpoint."""


Actions = tuple[Action, ...]
