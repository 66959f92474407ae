"""Commands: the orders that come out of the core. The shells around it carry them out.

A command to workers goes to the members of the job, that is the process of each rank, and is one command at any scale;
Assign alone goes to one process.
"""

import enum

import msgspec


class FallbackTier(enum.StrEnum):
    """Sources of a recovery's state, the best first."""

    REPLICA = "replica"  # the memory of other ranks' devices: nothing that was finished is lost
    BUDDY = "buddy memory"  # snapshots in host memory, a few steps old
    CHECKPOINT = "checkpoint"  # on disk


class _Command(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    why: str


class Spawn(_Command, frozen=True, kw_only=True):
    """Start a process of the script. `rank` is None for a standby."""

    agent: str
    process: str
    rank: int | None
    slot: int  # LOCAL_RANK of an initial worker; the device a standby builds on


class Kill(_Command, frozen=True, kw_only=True):
    """SIGKILL a process: it was declared failed, and must be known dead before its rank is taken."""

    process: str
    after_step: bool = False  # nothing is wrong with it but its speed: it shall end between two steps, by itself


class Begin(_Command, frozen=True, kw_only=True):
    """All initial ranks hold the same state: take the first step.

    `buddies` has, for each rank, the rank that keeps its snapshots in its memory; empty if there are none. `writers`
    has, for each part of a divided state, its key and the rank that writes it into checkpoints.
    """

    generation: int
    buddies: tuple[int, ...] = ()
    writers: tuple[tuple[str, int], ...] = ()


class Assign(_Command, frozen=True, kw_only=True):
    """A standby takes a rank. From now on it is the replacement."""

    process: str
    rank: int
    generation: int


class Stop(_Command, frozen=True, kw_only=True):
    """Close the older generation: collectives fail at once, a write in progress finishes, then pause.

    `alone`: a rank that waits in a collective between two steps goes on alone, and pauses before its next step.
    """

    generation: int
    alone: bool = False


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that serves its intact state."""

    rank: int
    address: str  # a Unix socket, for targets on the same host
    endpoint: str = ""  # host:port, for targets on other hosts
    shard: str = ""  # the part of the state that it holds; a target copies from sources of its own part
    of: int = -1  # the rank whose snapshot is meant; -1: the source's own state, as it stands


class Restore(_Command, frozen=True, kw_only=True):
    """Reach `target`: finish the step locally if prepared, copy from `sources` if blank or torn, then roll back.

    `targets` are ranks that copy. `attempt` counts how often step `target` has been started before.

    On a fallback tier every rank goes back, whatever it holds. BUDDY: a rank that is no target takes its
    own snapshot of `target`. CHECKPOINT: `sources` read their parts from the disk, and `targets` copy from them.
    """

    generation: int
    target: int
    attempt: int
    sources: tuple[Source, ...]
    targets: tuple[int, ...]
    derived: tuple[int, ...] = ()  # ranks whose private state is lost, and follows from rank and step
    tier: FallbackTier = FallbackTier.REPLICA
    undone: int = 0  # versions that were finished, and are computed again: on a fallback tier
    history: int = 0  # the generation that last undid versions: what is kept of a version is of one history
    distrust: int = -1  # from this version on the state may be corrupted: checkpoints of such versions are removed
    keep: int = -1  # the version of which snapshots are not to be overwritten yet
    runs_code: bool = False  # targets run the code before step `target`, with results that others have of it
    meets_at: int = 0  # the others wait in its collective of this number; 0: they have run all of it
    given: tuple[int, ...] = ()  # ranks that wait in an earlier one, or come to it, and get results of `sources`


class Resume(_Command, frozen=True, kw_only=True):
    """The handshake agreed: train on from the target version. `buddies` and `writers` as in Begin."""

    generation: int
    buddies: tuple[int, ...] = ()
    writers: tuple[tuple[str, int], ...] = ()
    doubts: tuple[str, ...] = ()  # why the bits may not be those of an undisturbed run; checkpoints keep that


class Save(_Command, frozen=True, kw_only=True):
    """The job must end: reach `target` as with Restore, but copy nothing; then write a checkpoint of it.

    `writers` has, for each part of the state, its key and the rank that writes it; `rank` completes the checkpoint.
    `absent` are the ranks whose private state no process has: the store of the generation gets it from their dead
    holders' agents. Of those in `derived` there is none, and it follows from rank and step.
    """

    generation: int
    target: int
    rank: int
    writers: tuple[tuple[str, int], ...]
    absent: tuple[int, ...] = ()
    derived: tuple[int, ...] = ()


class WindDown(_Command, frozen=True, kw_only=True):
    """The next step that all ranks finish is the last one for now: the job is to end, or ranks move to other hosts."""

    generation: int


class Release(_Command, frozen=True, kw_only=True):
    """Training finished: leave the loop and run to the end of the script; standbys exit."""

    generation: int


class ReleaseHost(_Command, frozen=True, kw_only=True):
    """Nothing of the job is left on this host, and nothing will be started there: its agent may end."""

    agent: str
    faulty: bool = False  # its hardware has reported a fault


class RefuseDrain(_Command, frozen=True, kw_only=True):
    """This host stays in the job: its ranks cannot move without a step being repeated, or not at all."""

    agent: str


class OrderHost(_Command, frozen=True, kw_only=True):
    """Ask the supplier for one more spare host. Its agent joins under the name of the order."""

    order: str
    wanted: int  # the number of hosts that the job is to have
    exclude: tuple[str, ...] = ()  # machines that are of no use: of the job, lost twice, or with a fault


class CancelHost(_Command, frozen=True, kw_only=True):
    """Tell the supplier that the host of an order is not needed (any more), whether it has come or not."""

    order: str
    identifier: str = ""  # the cluster's word for the order; empty: not known


class EndJob(_Command, frozen=True, kw_only=True):
    """The job is over. `error` is empty if training finished."""

    error: str
    details: str  # e.g. the user's traceback


class Notice(_Command, frozen=True, kw_only=True):
    """A line for people."""

    level: str  # "info", "warning", "error"


Command = (
    Spawn
    | Kill
    | Begin
    | Assign
    | Stop
    | Restore
    | Resume
    | Save
    | WindDown
    | Release
    | ReleaseHost
    | RefuseDrain
    | OrderHost
    | CancelHost
    | EndJob
    | Notice
)
WorkerCommand = Begin | Assign | Stop | Restore | Resume | Save | WindDown | Release
StandingOrder = Begin | Stop | Restore | Resume | Save | Release  # to all members: holds until the next one
