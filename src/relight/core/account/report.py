"""The report of a job as one value, `report.json`: the controller fills it, people and `timeline` read it.

All times are seconds: since the job's start where a moment is meant, a duration elsewhere. The trace's stamps
meet this clock through `JobReport.started_wall`.
"""

import msgspec

from relight.core.account.noticing import PLANNED

ENDED = "ended"  # kind of a failure whose process is still being torn down: how it ended is said later


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """One device lost, and how it was noticed."""

    number: int  # 1: the first of the job
    rank: int  # -1: not a rank's (a standby's, or the whole job's, as in "communication")
    process: str
    kind: str  # "killed", "exited", "exception", "frozen", "hang", "slow", "drained", "host lost", "communication", ...
    step: int
    phase: str  # a name of `Phase`, as the process last stamped it
    evidence: str
    generation: int  # the one it happened in
    stack: str = ""  # of a hang: what the threads of the process were doing, as faulthandler writes it
    noticed_seconds: float  # moment, since the job's start
    detect_seconds: float | None = None  # fault to notice; None if nothing tells the time of the fault
    detect_evidence: str = ""  # how that is known: of a planned fault exactly, of any other it is an estimate
    idle_seconds: float | None = None  # of a hang or a freeze: from its last sign of progress to the notice

    @property
    def estimated(self) -> bool:
        """True if `detect_seconds` is an estimate: no process saw the fault strike."""
        return self.detect_seconds is not None and self.detect_evidence != PLANNED

    @property
    def struck_seconds(self) -> float:
        """The moment of the fault, or the moment it was noticed if that is all that is known."""
        return self.noticed_seconds - (self.detect_seconds or 0.0)


class RecoveryStages(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one recovery, by stages. A stage is as long as its slowest rank needed.

    The total runs from the fault (its notice, if nothing tells the time of the fault) to the first forward after
    it; the redo comes on top. It need not be the sum: ranks do different stages side by side.
    """

    detect_seconds: float | None = None  # of the first failure: fault to notice, perhaps estimated; None: not known
    stop_seconds: float = 0.0  # until every survivor is paused
    decide_seconds: float = 0.0
    replace_seconds: float = 0.0  # until every rank has a living process
    reform_seconds: float = 0.0  # the new process group
    finish_seconds: float = 0.0  # prepared survivors complete the step locally
    copy_seconds: float = 0.0  # state from the sources to the replacements
    digest_seconds: float = 0.0
    rollback_seconds: float = 0.0  # data cursor, random streams and buffers
    resume_seconds: float = 0.0  # handshake, until the first forward
    redo_seconds: float = 0.0  # the first step after it, up to its commit
    total_seconds: float = 0.0


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """One recovery, from the first failure to training again; failures that strike meanwhile belong to it."""

    number: int  # 1: the first of the job
    generation: int  # the one it opened; the last one, if failures struck during the recovery
    failures: tuple[int, ...]  # numbers of the failures it answers, the first one first
    decision: str  # "forward", "back" or "as they are"
    target_version: int
    reason: str
    survivors: tuple[int, ...] = ()
    replaced: tuple[int, ...] = ()
    replacement_kind: str = "none"  # "standby", "fresh process", both joined by "and", or "none"
    sources: tuple[int, ...] = ()
    stages: RecoveryStages = RecoveryStages()
    steps_repeated: int = 0  # 0 or 1 from replicas; on a fallback tier the finished ones, and the one in flight
    tier: str = "replica"  # where the state came from: "replica", "buddy memory" or "checkpoint"
    steps_undone: int = 0  # of those repeated, the ones that were finished
    moved_bytes: int = 0
    restarts: int = 0  # failures that struck during it
    wrote: tuple[int, ...] = ()  # survivors that had begun to write in the interrupted step
    torn: tuple[int, ...] = ()  # survivors whose state was worth nothing, since a write was cut short


class DoubtReport(msgspec.Struct, frozen=True, kw_only=True):
    """A failure struck where relight cannot vouch for the bits of an undisturbed run."""

    rank: int
    process: str
    step: int
    reason: str


class StorageWait(msgspec.Struct, frozen=True, kw_only=True):
    """Orders that waited until the journal was safe on the disk."""

    at_seconds: float  # moment, since the job's start
    seconds: float


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that were put into inference engines while the job trained."""

    updates: int = 0  # that some engine took
    updates_bytes: int = 0  # of weights, in all these
    updates_seconds: float = 0.0
    engines: dict[str, int] = {}  # those connected last, and the version that each answers with (-1: none)


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """One job."""

    job: str
    started_wall: float = 0.0  # Unix seconds
    wall_seconds: float = 0.0
    world_size: int = 0
    standbys: int = 0
    steps: int = 0  # committed
    until: int = 0  # asked for
    began_at: int = 0  # steps that were committed when it started: those of the checkpoint it went on from
    failures: tuple[FailureReport, ...] = ()
    recoveries: tuple[RecoveryReport, ...] = ()
    notices: tuple[str, ...] = ()
    steps_repeated: int = 0
    moved_bytes: int = 0
    final_version: int = 0
    final_state_digest: str = ""
    final_lineage: str = ""
    time_lost_seconds: float = 0.0
    cut_collectives: int = 0  # collectives outside the protected part of a step that a recovery cut short
    bits_as_undisturbed: str = ""  # "yes" or "not known" of a job that finished; empty of any other
    doubts: tuple[DoubtReport, ...] = ()  # why it is not known
    controller_restarts: int = 0
    storage_waits: tuple[StorageWait, ...] = ()  # long ones
    published: PublishReport | None = None  # None: nothing was to be published
    error: str = ""  # empty: training finished
    saved_version: int = -1  # of the checkpoint that was written before a job which had to end did; -1: there is none
    saved_path: str = ""  # its directory
    versions: dict[str, str] = {}  # of relight, Python, torch, ...


def encode_report(report: JobReport) -> bytes:
    """The text of `report.json`, indented for people."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def decode_report(text: bytes) -> JobReport:
    """Read `report.json`. Raises msgspec.DecodeError, of which ValidationError is one."""
    return msgspec.json.decode(text, type=JobReport)
