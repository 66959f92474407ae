"""Events of a job, for programs: one JSON object a line, with stable names. Pure.

The journal is written for replays and may change with relight; these events are what others may rely on. A field or a
kind of event may be added within a version of the format; nothing is taken away, renamed or given another unit.
"""

import msgspec

from relight.core.account.report import RecoveryStages

FORMAT_VERSION = 1


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Fields of every event."""

    format: int = FORMAT_VERSION
    time: str  # of the wall clock, ISO 8601 with its offset
    seconds: float  # since the job's start
    job: str
    generation: int  # goes up with each recovery


class JobStarted(_Event, frozen=True, kw_only=True, tag="job_started"):
    """A job began."""

    script: str
    world_size: int
    nodes: int
    standbys: int


class HostJoined(_Event, frozen=True, kw_only=True, tag="host_joined"):
    """A host's agent reached the controller, for the first time or again."""

    host: str


class HostLost(_Event, frozen=True, kw_only=True, tag="host_lost"):
    """A host is given up, with all that it ran."""

    host: str
    evidence: str


class ProcessStarted(_Event, frozen=True, kw_only=True, tag="process_started"):
    """A worker or a standby; `rank` is null for a standby."""

    process: str
    rank: int | None
    host: str
    pid: int


class ProcessEnded(_Event, frozen=True, kw_only=True, tag="process_ended"):
    """A process is gone, whether that is a failure or not. `exit_status` is negative for a signal, null: not known."""

    process: str
    rank: int | None
    host: str
    exit_status: int | None
    evidence: str


class StandbyReady(_Event, frozen=True, kw_only=True, tag="standby_ready"):
    """A standby is warm."""

    process: str
    host: str


class TrainingStarted(_Event, frozen=True, kw_only=True, tag="training_started"):
    """Every rank holds the same state; the first step begins."""

    until: int  # steps asked for


class Failure(_Event, frozen=True, kw_only=True, tag="failure"):
    """A rank was lost, or (rank -1) all of them stopped getting on."""

    number: int
    rank: int
    process: str
    kind: str
    step: int
    phase: str
    evidence: str
    detect_seconds: float | None  # from the fault to its notice, where that is known or can be estimated
    detect_evidence: str  # how it is known: "known: ..." of a planned fault, else "estimated: ..."; empty: it is not


class FailureExplained(_Event, frozen=True, kw_only=True, tag="failure_explained"):
    """News of an earlier failure: how its process ended."""

    number: int
    kind: str
    evidence: str


class RecoveryStarted(_Event, frozen=True, kw_only=True, tag="recovery_started"):
    """Every rank was ordered to pause; once more, under a new generation, if another failure strikes meanwhile."""

    reason: str


class RecoveryDecided(_Event, frozen=True, kw_only=True, tag="recovery_decided"):
    """To which version all ranks go, and who gets the state from whom."""

    target_version: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    reason: str


class TrainingResumed(_Event, frozen=True, kw_only=True, tag="training_resumed"):
    """Every rank holds the agreed version and trains on."""


class RecoveryFinished(_Event, frozen=True, kw_only=True, tag="recovery_finished"):
    """Every rank has committed a step since: the recovery's account."""

    number: int
    failures: tuple[int, ...]
    decision: str
    target_version: int
    replaced: tuple[int, ...]
    replacement_kind: str
    sources: tuple[int, ...]
    steps_repeated: int
    tier: str  # where the state came from: "replica", "buddy memory" or "checkpoint"
    steps_undone: int  # of those repeated, the ones that were finished; only on a fallback tier
    moved_bytes: int
    restarts: int
    wrote: tuple[int, ...]  # survivors that had begun to write in the interrupted step
    torn: tuple[int, ...]  # survivors whose write was cut short
    stages: RecoveryStages  # seconds


class WeightsPublished(_Event, frozen=True, kw_only=True, tag="weights_published"):
    """A version went to the inference engines, or did not; it is reported within a second or two."""

    version: int
    engines: dict[str, int]  # those that are connected, and the version that each answers with (-1: none)
    dropped: dict[str, str]  # engines that it did not reach, and why
    error: str  # why no engine has it
    update_seconds: float


class FaultInjected(_Event, frozen=True, kw_only=True, tag="fault_injected"):
    """A fault of `relight chaos` is about to strike."""

    process: str
    fault: str


class BitsDoubted(_Event, frozen=True, kw_only=True, tag="bits_doubted"):
    """A failure struck where the bits of an undisturbed run cannot be vouched for. A rank may say it again."""

    rank: int
    process: str
    step: int
    reason: str


class ControllerRestarted(_Event, frozen=True, kw_only=True, tag="controller_restarted"):
    """The controller died, and its successor has taken over."""


class NoticeSaid(_Event, frozen=True, kw_only=True, tag="notice"):
    """A line that relight showed to people."""

    level: str  # info, warning or error
    text: str


class JobEnded(_Event, frozen=True, kw_only=True, tag="job_ended"):
    """The last event. `error` is empty if training finished."""

    error: str
    steps: int
    until: int
    failures: int
    recoveries: int
    steps_repeated: int
    time_lost_seconds: float
    state_digest: str
    bits_as_undisturbed: str  # "yes" or "not known"; empty if it ended with an error
    doubts: tuple[str, ...]  # why it is not known


Event = (
    JobStarted
    | HostJoined
    | HostLost
    | ProcessStarted
    | ProcessEnded
    | StandbyReady
    | TrainingStarted
    | Failure
    | FailureExplained
    | RecoveryStarted
    | RecoveryDecided
    | TrainingResumed
    | RecoveryFinished
    | WeightsPublished
    | FaultInjected
    | BitsDoubted
    | ControllerRestarted
    | NoticeSaid
    | JobEnded
)


def schema() -> bytes:
    """The JSON schema of an event."""
    found = msgspec.json.schema(Event)
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "relight event", **found}
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
