"""Every message between relight's processes, as types. Nothing else crosses a socket; nothing is ever unpickled.

Worker <-> agent: a Unix stream socket. Agent <-> controller and observer <-> controller: TCP, after a handshake
that proves knowledge of the job's token. The agent relays workers' messages and never interprets them.
"""

import msgspec

from relight.core.detection.sampling import Sample as Sample  # noqa: PLC0414 (the agents' side finds it here)
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Assign, Begin, Kill, Release, Restore, Resume, Save, Spawn, Stop, WindDown
from relight.core.protocol.position import Position
from relight.wire.status import GpuStatus, PublishStatus, RestoreStatus

PROTOCOL_VERSION = 5
MAX_FRAME_BYTES = 4 * 2**20


class _Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


# --- handshake (TCP only) ---------------------------------------------------------------------------------------
class StartTls(_Message, frozen=True, kw_only=True):
    """First frame of a listening side that speaks TLS only, in the clear; the rest follows in TLS."""

    protocol_version: int


class Challenge(_Message, frozen=True, kw_only=True):
    """First frame on every TCP connection (in TLS, where there is TLS), from the listening side."""

    protocol_version: int
    nonce: bytes


class Hello(_Message, frozen=True, kw_only=True):
    """The connecting side's answer: its role and name, and the proof that it knows the token (connection/)."""

    protocol_version: int
    role: str  # to the controller "agent" or "observer"
    name: str = ""
    mac: bytes = b""
    nonce: bytes = b""  # part of the listening side's proof
    slots: int = 0
    spare: bool = False  # an agent's: its host is none of the nodes that the job starts on
    machine: str = ""  # an agent's: the name that the cluster has for its host
    versions: dict[str, str] = {}  # an agent's: of what its workers run
    processes: tuple[str, ...] = ()  # an agent's: alive, or ended without the controller's knowledge
    life: str = ""  # names this run of the agent (connection/outbox.py)
    controller: str = ""  # the life of the controller that the agent heard last
    received: int = 0  # counted messages that it has received from that one


class Welcome(_Message, frozen=True, kw_only=True):
    """The listening side accepts the peer, and proves that it knows the token (connection/handshake.py)."""

    job: str = ""
    mac: bytes = b""
    settings: bytes = b""  # of the job, as JSON: an agent on another host learns from them what to run
    life: str = ""  # names this run of the controller, and this agent's place in it
    received: int = 0  # counted messages that it has received from this life of the agent


class Received(_Message, frozen=True, kw_only=True):
    """So many counted messages have arrived and, at the controller, are in the journal."""

    count: int


class Refused(_Message, frozen=True, kw_only=True):
    """The listening side closes the connection for this reason. `again`: another attempt may succeed."""

    reason: str
    again: bool = False


# --- the store: rendezvous keys of a generation -----------------------------------------------------------------
class StoreSet(_Message, frozen=True, kw_only=True):
    generation: int
    key: str
    value: bytes


def private_key(rank: int) -> str:
    """Return the key for the private state of a rank without a process, while a last checkpoint is written."""
    return f"private/{rank}"


class StoreWait(_Message, frozen=True, kw_only=True):
    """Ask for the values of `keys`, answered once all are there."""

    request: int
    generation: int
    keys: tuple[str, ...]


class StoreAdd(_Message, frozen=True, kw_only=True):
    """Add to a counter; answered with its new value."""

    request: int
    generation: int
    key: str
    amount: int


class StoreReply(_Message, frozen=True, kw_only=True):
    """`values` in the order of the request's keys; empty with `error` set if the generation is closed."""

    request: int
    values: tuple[bytes, ...]
    error: str = ""


class StoreLost(_Message, frozen=True, kw_only=True):
    """The controller was restarted with an empty store: every worker says again what it has put there."""


class StoreRecall(_Message, frozen=True, kw_only=True):
    """The end of what a worker says again: by key, how much it has added to each counter."""

    generation: int
    added: dict[str, int]


# --- worker <-> agent -------------------------------------------------------------------------------------------
class WorkerHello(_Message, frozen=True, kw_only=True):
    """First frame of a worker. The agent compares pid with the socket's peer credentials."""

    process: str
    pid: int


WorkerUp = (
    WorkerHello
    | ev.StandbyReady
    | ev.TrainingEntered
    | ev.Stopped
    | ev.Restored
    | ev.RestoreFailed
    | ev.StepResumed
    | ev.WorkerFailed
    | ev.CollectiveFailed
    | ev.StateDiffers
    | ev.Saved
    | ev.TrainingDone
    | ev.WorkerReleased
    | ev.WorkerNotice
    | ev.BitsDoubted
    | ev.FaultStruck
    | StoreSet
    | StoreWait
    | StoreAdd
    | StoreRecall
    | PublishStatus
    | RestoreStatus
)
WorkerDown = Begin | Assign | Stop | Restore | Resume | Save | WindDown | Release | StoreReply | StoreLost


# --- agent <-> controller ---------------------------------------------------------------------------------------
class Samples(_Message, frozen=True, kw_only=True):
    samples: tuple[Sample, ...]


class Pace(_Message, frozen=True, kw_only=True):
    """The pace of an agent's samples, and whether its processes' phases are wanted. At first: often, and yes."""

    sample_seconds: float
    trace: bool


class FromWorker(_Message, frozen=True, kw_only=True):
    """A worker's frame, relayed as it came."""

    process: str
    payload: msgspec.Raw


class FromWorkers(_Message, frozen=True, kw_only=True):
    """Frames of several workers that belong together, oldest first (see core.protocol.gathering)."""

    messages: tuple[FromWorker, ...]


class ToWorkers(_Message, frozen=True, kw_only=True):
    """A frame for some of this agent's workers."""

    processes: tuple[str, ...]
    payload: msgspec.Raw


class TraceChunk(_Message, frozen=True, kw_only=True):
    """Phase changes of one process since the last chunk: (stamp_ns, generation, step, phase, version) each."""

    process: str
    rank: int
    records: tuple[tuple[int, int, int, int, int], ...]
    clock_offset_ns: int  # wall clock minus CLOCK_MONOTONIC on the agent's host


class CopyPrivate(_Message, frozen=True, kw_only=True):
    """Give `target` the rank-private state of `version` that `source`, its dead predecessor, held.

    A version that is not there is skipped: an older predecessor may have it.
    """

    source: str
    target: str
    version: int


class TakePrivate(_Message, frozen=True, kw_only=True):
    """Read private state for a target on another host: answered with PrivateState, if that version is there."""

    source: str
    target: str
    version: int


class PrivateState(_Message, frozen=True, kw_only=True):
    """Rank-private state on its way from one host to another, through the controller.

    `batch` tells the target which batch the source drew last. `problem` says why there is no payload.
    """

    source: str
    target: str
    version: int
    payload: bytes
    batch: bytes = b""
    problem: str = ""


class TakeStack(_Message, frozen=True, kw_only=True):
    """Ask for the stacks of a process. Answered with StackTaken, if the agent can; not repeated if it cannot."""

    process: str


class StackTaken(_Message, frozen=True, kw_only=True):
    """The Python stacks of a process's threads, as faulthandler writes them; or `problem`: why there are none."""

    process: str
    text: str = ""
    problem: str = ""


class ForgetProcess(_Message, frozen=True, kw_only=True):
    """The position page of this dead process is not needed any more."""

    process: str


class DrainHost(_Message, frozen=True, kw_only=True):
    """Move the ranks of this host to others between two steps, and give it back."""

    host: str
    why: str
    leaves: bool = False  # it will be gone soon in any case


class DrainAnswer(_Message, frozen=True, kw_only=True):
    """A host was given back, or stays in the job since its ranks cannot move."""

    host: str
    why: str
    refused: bool
    faulty: bool = False  # it was given back since its hardware has reported a fault


class StopAgent(_Message, frozen=True, kw_only=True):
    """End every process you started, then exit."""

    why: str


AgentUp = (
    Hello
    | ev.ProcessStarted
    | ev.ProcessDying
    | ev.ProcessExited
    | ev.HostFaulty
    | FromWorker
    | FromWorkers
    | PrivateState
    | Samples
    | GpuStatus
    | StackTaken
    | TraceChunk
    | Received
)
AgentDown = (
    StartTls
    | Challenge
    | Welcome
    | Refused
    | Received
    | Spawn
    | Kill
    | ToWorkers
    | CopyPrivate
    | TakePrivate
    | PrivateState
    | TakeStack
    | ForgetProcess
    | Pace
    | StopAgent
)


# --- controller -> observer -------------------------------------------------------------------------------------
class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    process: str
    position: Position
    rss_bytes: int


class StatusUpdate(_Message, frozen=True, kw_only=True):
    """A snapshot for people, a few times a second."""

    job: str
    stage: str
    generation: int
    until: int
    failures: int
    standbys_ready: int
    steps_per_second: float
    ranks: tuple[RankStatus, ...]
    winding_down: bool = False  # it ends after its next step, and a checkpoint
    waiting: str = ""  # whom the job waits for while it does not train, and why
    restoring: tuple[RestoreStatus, ...] = ()  # copies of the recovery under way
    publishing: PublishStatus | None = None  # the newest word about it


class NoticeUpdate(_Message, frozen=True, kw_only=True):
    level: str
    text: str


class JobEnded(_Message, frozen=True, kw_only=True):
    error: str
    details: str


ObserverUp = Hello | StopAgent | DrainHost
ObserverDown = StartTls | Challenge | Welcome | Refused | StatusUpdate | NoticeUpdate | DrainAnswer | JobEnded
