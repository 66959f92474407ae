"""States that workers and agents report for people, besides phases: never journaled, and no decision depends on them.

The controller writes them to `status.jsonl` of the run directory, a `StatusLine` each. A state is reported when it has
changed, at most twice a second (GPUs: every five seconds); a reader that missed lines knows all from the next one.
"""

import msgspec

from relight.core.protocol.numbers import Seconds, Whole


class _Status(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class EngineVersion(msgspec.Struct, frozen=True, kw_only=True):
    """An inference engine that is connected, and the version that it answers with (-1: none yet)."""

    name: str
    pid: Whole
    version: Whole


class PublishStatus(_Status, frozen=True, kw_only=True):
    """Publishing from one process: the engines, the update under way, and what there was before it.

    `moved_bytes` of `total_bytes` are held by every engine that takes part; both are 0 if no update is under way.
    """

    process: str
    engines: tuple[EngineVersion, ...] = ()
    version: Whole = -1  # of the update under way, or the last one
    moved_bytes: Whole = 0
    total_bytes: Whole = 0
    update_seconds: Seconds = 0.0  # how long it has been under way, or took
    updates: Whole = 0  # that some engine took, since the process began
    updates_bytes: Whole = 0  # of weights, in all these
    updates_seconds: Seconds = 0.0
    dropped: dict[str, str] = {}  # engines that the last update did not reach, and why
    error: str = ""  # why no engine has the last update


class RestoreStatus(_Status, frozen=True, kw_only=True):
    """A replacement copies the state: how much of it has arrived. The last one of a copy has both numbers equal."""

    process: str
    rank: Whole
    generation: Whole
    copied_bytes: Whole
    total_bytes: Whole
    seconds: Seconds


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a device. None: it does not tell."""

    index: int  # as the agent's workers number them
    name: str = ""
    busy_share: float | None = None  # 0 to 1
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    uncorrected_errors: int | None = None  # of its memory, since the driver was loaded
    slowed: bool | None = None  # by heat or lack of power, though there is work
    pids: tuple[int, ...] = ()  # that compute on it, as far as the agent's namespace shows them


class GpuStatus(_Status, frozen=True, kw_only=True):
    """The GPUs of one host."""

    agent: str
    gpus: tuple[Gpu, ...]


Status = PublishStatus | RestoreStatus | GpuStatus


class StatusLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `status.jsonl`; `now` is in seconds since the job's start."""

    now: float
    status: Status


def decode_line(line: bytes) -> StatusLine:
    """Read a line. Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=StatusLine)
