"""Events of a worker: facts that its drivers hand in. The orders of protocol/commands.py are events as well."""

import msgspec

from relight.core.protocol.commands import WorkerCommand


class _Event(msgspec.Struct, frozen=True):
    pass


# --- start and end ------------------------------------------------------------------------------------------------
class ScriptEntered(_Event, frozen=True):
    """An initial rank reached its first step."""


class StandbyWarm(_Event, frozen=True):
    """A standby has rehearsed a step, or builds nothing before it has a rank."""


class ScriptFailed(_Event, frozen=True):
    """The script raised. `saves`: this job writes checkpoints, so a last one may be made."""

    saves: bool


# --- a step -------------------------------------------------------------------------------------------------------
class StepWanted(_Event, frozen=True):
    """The loop asks for the next step."""


class StepEntered(_Event, frozen=True):
    """The block of a step begins."""


class GradientsReady(_Event, frozen=True):
    """All that the step needs of other ranks is here; the barrier is next."""


class StatesAgree(_Event, frozen=True):
    """The states were compared, and replicas hold the same bits."""


class StatesDiffer(_Event, frozen=True):
    """The states were compared, and replicas hold different bits."""


class PrivateKept(_Event, frozen=True):
    """The rank-private state of the next version is kept beside the page."""


class BarrierPassed(_Event, frozen=True):
    """The barrier's all-reduce completed here: every rank is prepared.

    `winds_down`: some rank has said in it that all are to pause after this step.
    """

    winds_down: bool = False


class BarrierPutOff(_Event, frozen=True):
    """The barrier's all-reduce completed here, and some rank has said in it that it is not prepared.

    Its steps have just changed a buffer for the first time. Ranks agree on such buffers, and come to the barrier again.
    """


class CollectiveBroke(_Event, frozen=True):
    """A collective failed because of a peer, not of the script."""


class CutShort(_Event, frozen=True):
    """A collective after the write was cut short by a recovery: the step ends with this rank's own value."""

    torn_by: str = ""  # the collective, and the line of the script, for people


class WentOnAlone(_Event, frozen=True):
    """A collective between two steps was cut short by a recovery: code there went on with this rank's own value."""


class WaitsBetweenSteps(_Event, frozen=True):
    """Code between two steps stands in a collective, which broke, and a replacement could run all of it.

    It has changed no tensor that replicas share since the step, and what earlier collectives gave is kept.
    """

    collective: int  # its number since the step, from 1


class CodeRan(_Event, frozen=True):
    """Code between two steps is over, of which a replacement can run all, given the results of its collectives."""

    results: int  # of all of its collectives, which are kept, and are the same on every rank; -1: some are not


class StepUndone(_Event, frozen=True):
    """The step was undone before its barrier, to be computed again, though nothing has failed."""


class StepFinished(_Event, frozen=True):
    """The block has ended and every write is done.

    `surprise`: what came after a barrier in front of a write, against what was learnt, as a reason to doubt the bits;
    empty: nothing did.
    """

    lineage: str  # of the next version
    surprise: str = ""


class Interrupted(_Event, frozen=True):
    """The main thread stops where it is, since the generation is closed."""


# --- a recovery ---------------------------------------------------------------------------------------------------
class Ordered(_Event, frozen=True):
    """The order that the main thread waits for is here, or a newer Stop. See `Worker.is_ready`."""


class StepLeft(_Event, frozen=True):
    """The main thread is out of the interrupted step. The driver knows whether a copy of all that changed was kept."""

    can_be_undone: bool = True
    torn_by: str = ""  # if it can be neither undone nor finished: what did that, for people


class StateTaken(_Event, frozen=True):
    """The state of the target version is in this process, complete and verified."""

    version: int
    lineage: str
    until: int


class ResultsTaken(_Event, frozen=True):
    """The results of collectives that this rank has not completed, and another one has, are in this process."""


class SnapshotMissing(_Event, frozen=True):
    """This rank has no snapshot of the target version in its own memory."""


class GroupsFormed(_Event, frozen=True):
    """The process groups of the new generation are formed."""


class RestoreFailed(_Event, frozen=True):
    """Taking the state or forming the groups failed."""

    evidence: str


class PartSaved(_Event, frozen=True):
    """This rank's part of a last checkpoint is written, or cannot be."""

    path: str = ""  # of the whole, on the rank that completes it
    error: str = ""


Event = (
    WorkerCommand
    | ScriptEntered
    | StandbyWarm
    | ScriptFailed
    | StepWanted
    | StepEntered
    | GradientsReady
    | StatesAgree
    | StatesDiffer
    | PrivateKept
    | BarrierPassed
    | BarrierPutOff
    | CollectiveBroke
    | CutShort
    | WentOnAlone
    | WaitsBetweenSteps
    | CodeRan
    | StepUndone
    | StepFinished
    | Interrupted
    | Ordered
    | StepLeft
    | StateTaken
    | ResultsTaken
    | SnapshotMissing
    | GroupsFormed
    | RestoreFailed
    | PartSaved
)
