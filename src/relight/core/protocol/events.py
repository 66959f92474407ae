"""Events: the facts that go into the core. Each is one journal line; replaying them repeats every decision.

An event carries no clock reading of the controller; the time of its arrival is the `now` argument of `handle`.
Fields ending in `_ns` are CLOCK_MONOTONIC readings of the host where the fact was observed.
"""

import msgspec

from relight.core.protocol.fault import Fault
from relight.core.protocol.numbers import Seconds, Whole
from relight.core.protocol.position import Position


class _Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class AgentJoined(_Event, frozen=True, kw_only=True):
    """An agent connected and can start `slots` ranks on its node. Said again of another one in its place."""

    agent: str
    slots: Whole
    spare: bool = False  # room for standbys and replacements: never one of the nodes that the job starts on
    life: str = ""  # names this run of the agent: one that is known by another life has no memory of the first one's
    machine: str = ""  # the name that the cluster has for its host; empty: not known


class AgentLost(_Event, frozen=True, kw_only=True):
    """The connection to an agent ended and it did not come back in time."""

    agent: str
    evidence: str
    silent_seconds: Seconds = 0.0  # since its last word; 0.0: not known
    version: Whole = -1  # the newest that any rank is known to have committed; -1: not known


class HostDraining(_Event, frozen=True, kw_only=True):
    """A host is to be left in order: its ranks move to other hosts between two steps, then it is given back."""

    agent: str
    reason: str
    leaves: bool = False  # it will be gone soon in any case; else it may stay if no other host has room


class HostFaulty(_Event, frozen=True, kw_only=True):
    """The hardware of a host has reported a fault, such as a GPU that is lost: the host is left, and not used again."""

    agent: str
    reason: str


class HostOrdered(_Event, frozen=True, kw_only=True):
    """The supplier has placed an order for a host; `identifier` is the cluster's word for it."""

    order: str
    identifier: str = ""


class HostWaits(_Event, frozen=True, kw_only=True):
    """The host of an order has not come yet, for the reason that the cluster gives. Only people need to know it."""

    order: str
    reason: str


class HostRefused(_Event, frozen=True, kw_only=True):
    """No host comes of an order, for the reason that the supplier gave."""

    order: str
    reason: str
    uncertain: bool = False  # it may have been placed all the same, as by a command that did not end in time


class HostCancelled(_Event, frozen=True, kw_only=True):
    """The supplier has cancelled an order, or could not, for the reason `error`."""

    order: str
    error: str = ""


class ProcessStarted(_Event, frozen=True, kw_only=True):
    """An agent started a process, as Spawn ordered."""

    process: str
    pid: Whole


class ProcessExited(_Event, frozen=True, kw_only=True):
    """A process is gone (its pidfd became readable). `exit_status` as in subprocess: negative is a signal."""

    process: str
    exit_status: Whole | None  # None: an adopted process, whose status is not known
    evidence: str
    position: Position
    noticed_ns: Whole


class ProcessDying(_Event, frozen=True, kw_only=True):
    """A process's main thread has ended: it can run nothing any more. How it ended shows once its memory is freed."""

    process: str
    position: Position
    noticed_ns: Whole


class ProcessSuspected(_Event, frozen=True, kw_only=True):
    """The detector holds a live process to be useless: frozen, hung, or too slow to stop."""

    process: str
    kind: str  # "frozen" or "hang"
    evidence: str
    position: Position
    noticed_ns: Whole
    stopped_seconds: Seconds = 0.0  # for so long it was seen stopped by a signal
    stack: str = ""  # what its threads were doing, if that could be found out; for people


class RankSlow(_Event, frozen=True, kw_only=True):
    """A rank's own work, waiting not counted, has long taken much more time than that of other ranks."""

    process: str
    evidence: str


class CommunicationStalled(_Event, frozen=True, kw_only=True):
    """No rank progresses and none is behind the others: the network, or a deadlock in the script."""

    evidence: str
    step: Whole
    noticed_ns: Whole
    idle_seconds: Seconds = 0.0  # since any rank's last progress, less a usual step; 0.0: not known
    stack: str = ""  # the same of several processes


class StandbyReady(_Event, frozen=True, kw_only=True):
    """A standby ran the script up to its first step, and one warm-up step on a detached group; or it builds late."""

    process: str
    layout_digest: str  # of names, shapes and dtypes of all state; empty: it builds when it knows which rank it takes


class TrainingEntered(_Event, frozen=True, kw_only=True):
    """An initial rank reached its first step; its replicated state has this digest."""

    process: str
    rank: Whole
    version: Whole
    layout_digest: str
    state_digest: str
    until: Whole
    shard: str = ""  # what part of the state this rank holds: ranks with the same key hold the same bits; empty: all
    state_bytes: Whole = 0  # of that part's parameters and buffers
    buddy_every: Whole = 0  # steps from one snapshot in a buddy's memory to the next; 0: there are none
    checkpoint_every: Whole = 0  # the same of checkpoints on disk


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A complete, verified copy of the state of `rank` in the host memory of the process that says so."""

    rank: Whole
    version: Whole


class Stopped(_Event, frozen=True, kw_only=True):
    """A survivor's main thread is paused, outside any write. The only basis of a decision."""

    process: str
    rank: Whole
    generation: Whole  # the one that Stop opened
    step: Whole  # newest step that was started here, or -1
    version: Whole
    lineage: str
    prepared: Whole  # step whose gradient is fully reduced here and known to be so, or -1
    torn: bool  # a write was cut short: this state is worth nothing
    torn_by: str = ""  # the object or the collective, and the line, for which it could not be undone
    blank: bool  # a replacement that has not been restored yet
    stop_seconds: Seconds  # from the arrival of Stop to the pause
    derivable: bool = False  # a rank's private state follows from its number and the step: nothing of it can be lost
    restore_address: str  # the Unix socket at which this worker serves its state
    restore_endpoint: str = ""  # host:port at which it serves other hosts; empty: it does not
    snapshots: tuple[Snapshot, ...] = ()  # of its own rank, and those that it keeps as a buddy
    checkpoints: tuple[Whole, ...] = ()  # versions of complete checkpoints on disk that it can see, newest first
    agreed: Whole = -1  # the newest version of which it knows that all replicas held the same bits
    sound: Whole = -1  # the newest version to which only replicas contributed of which it knows that
    wrote: bool = False  # it had begun to write in the step that was interrupted, whether that is undone or not
    alone: bool = False  # code between two steps has its own value of a collective that was cut short
    at_collective: Whole = 0  # code after the newest step waits in this collective, and has changed no tensor
    gives: int = -1  # results of so many collectives, of code after the newest step that has ended; -1: not of all
    comes: bool = False  # it is prepared for an epoch's last step, and a replacement can run the code after that


class RestoreProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and bytes that one worker spent in each stage of a restore."""

    finish_seconds: Seconds = 0.0
    reform_seconds: Seconds = 0.0
    copy_seconds: Seconds = 0.0
    copied_bytes: Whole = 0
    digest_seconds: Seconds = 0.0
    rollback_seconds: Seconds = 0.0


class Restored(_Event, frozen=True, kw_only=True):
    """A worker holds the target version, is rolled back to the start of its step and has formed the new group."""

    process: str
    rank: Whole
    generation: Whole
    version: Whole
    lineage: str
    state_digest: str
    layout_digest: str
    progress: RestoreProgress
    alone: bool = False  # as in Stopped; known only now if this rank has finished its step after the decision


class StateDiffers(_Event, frozen=True, kw_only=True):
    """Every rank saw, before the barrier of a step, that their states of its version differ."""

    process: str
    rank: Whole
    generation: Whole
    step: Whole
    digests: tuple[int, ...]  # by rank
    noticed_ns: Whole
    tensors: tuple[str, ...] = ()  # the first that differ, if that is known


class RestoreFailed(_Event, frozen=True, kw_only=True):
    """A transfer or the forming of the new group failed; the worker itself lives."""

    process: str
    generation: Whole
    evidence: str


class StepResumed(_Event, frozen=True, kw_only=True):
    """First commit after a recovery: when Resume arrived, its forward began, and it was committed."""

    process: str
    rank: Whole
    generation: Whole
    step: Whole
    resumed_ns: Whole
    forward_ns: Whole
    commit_ns: Whole


class WorkerFailed(_Event, frozen=True, kw_only=True):
    """The script raised in this worker; the process is about to exit."""

    process: str
    rank: Whole
    kind: str  # "exception" or "usage"
    step: Whole
    phase: str
    summary: str  # "ValueError: ..."
    traceback: str
    noticed_ns: Whole
    place: str = ""  # the innermost line of the script in the traceback, "train.py:31"; or of whatever it called
    stands: bool = False  # its state is whole, and it stays until it is killed: it may be needed for a last checkpoint
    after_undone: bool = False  # raised after an attempt that was undone, before the step was computed again


class CollectiveFailed(_Event, frozen=True, kw_only=True):
    """A collective broke in this worker though no failure has been announced yet."""

    process: str
    rank: Whole
    generation: Whole
    step: Whole
    summary: str
    noticed_ns: Whole


class Saved(_Event, frozen=True, kw_only=True):
    """The last checkpoint is complete, or `error`: why this worker could not do its part of it."""

    process: str
    generation: Whole
    version: Whole
    path: str = ""
    error: str = ""


class TrainingDone(_Event, frozen=True, kw_only=True):
    """A worker committed its last step and waits for the others."""

    process: str
    rank: Whole
    generation: Whole
    version: Whole
    lineage: str
    state_digest: str
    cut_collectives: Whole  # collectives outside the protected part of a step that a recovery cut short
    doubts: Whole | None = None  # how many doubts it has said; None: a relight that has no doubts


class FaultStruck(_Event, frozen=True, kw_only=True):
    """A planned fault is about to strike here (said a moment before, since some faults leave no time after)."""

    process: str
    fault: Fault


class WorkerReleased(_Event, frozen=True, kw_only=True):
    """A worker ran to the end of its script after training finished and is about to exit."""

    process: str


class WorkerNotice(_Event, frozen=True, kw_only=True):
    """Something the user should read, said once by one worker."""

    process: str
    rank: Whole
    text: str


class BitsDoubted(_Event, frozen=True, kw_only=True):
    """A failure struck where relight cannot vouch for the bits of an undisturbed run; said once for each reason."""

    process: str
    rank: Whole
    step: Whole  # the one under way when it was noticed
    reason: str


class ControllerRestarted(_Event, frozen=True, kw_only=True):
    """A successor of a dead controller has replayed the journal: orders that were under way may be lost."""


class ShutdownRequested(_Event, frozen=True, kw_only=True):
    """Ctrl-C, SIGTERM or `relight run` going away."""

    reason: str
    after_step: bool = False  # time to finish the step and to write a checkpoint is left
    version: Whole = -1  # the newest that any rank is known to have committed; -1: not known


Event = (
    AgentJoined
    | AgentLost
    | HostDraining
    | HostFaulty
    | HostOrdered
    | HostWaits
    | HostRefused
    | HostCancelled
    | ProcessStarted
    | ProcessDying
    | ProcessExited
    | ProcessSuspected
    | RankSlow
    | CommunicationStalled
    | StandbyReady
    | TrainingEntered
    | Stopped
    | Restored
    | RestoreFailed
    | StepResumed
    | WorkerFailed
    | CollectiveFailed
    | StateDiffers
    | Saved
    | TrainingDone
    | WorkerReleased
    | WorkerNotice
    | BitsDoubted
    | FaultStruck
    | ControllerRestarted
    | ShutdownRequested
)
