"""Samples that agents take of processes, and what the detector remembers of a process between them."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from relight.core.protocol.position import IN_STEP, Phase, Position


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One look of an agent at a live process. Sent a few times a second; never journaled."""

    process: str
    position: Position
    state: str  # third field of /proc/PID/stat: R, S, D, T, Z, ...
    run_delay_ns: int  # time spent waiting for a CPU since the process started (/proc/PID/schedstat)
    rss_bytes: int
    sampled_ns: int


# Waiting for a command after a step comes before that step's forward; done comes after everything.
_ORDER = {
    Phase.STARTING: 0,
    Phase.STANDBY: 0,
    Phase.PARKED: 1,
    Phase.OUTSIDE: 2,
    Phase.FORWARD: 3,
    Phase.BACKWARD: 4,
    Phase.BARRIER: 5,
    Phase.OPTIMIZER: 6,
    Phase.DONE: 7,
}


def _key(at: Position) -> tuple[int, int, int, int]:
    """Order positions by progress. Between steps, the step that comes next counts, which its version names.

    The generation comes first: a survivor that has not stopped yet is behind those that have.
    """
    step = at.step if at.phase in IN_STEP else at.version
    return (at.generation, step, at.collectives, _ORDER[at.phase])


@dataclass
class Watch:
    """The detector's memory of one process."""

    sample: Sample
    seen_at: float  # the detector's `now`
    since_ns: int  # the stamp from which it is idle
    before_ns: int  # when it was sampled the last time before; at first, now
    ahead_ns: int = 0  # the sample by which it was last not waited for; 0: there was none
    excused_ns: int = 0  # of that time: starved, or not looked at
    frozen_ns: int = 0
    leading_idle_ns: int = 0  # longest it was idle in this phase while it waited for no other rank
    behind_since_ns: int = 0  # from when, at the earliest, others have been waiting for it; 0: they do not
    idle_ns: int = 0  # by the newest sample
    key: tuple[int, int, int, int] = (0, 0, 0, 0)  # how far it got

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Derive from a new sample what is compared much more often than ranks are sampled."""
        self.idle_ns = max(0, self.sample.sampled_ns - self.since_ns - self.excused_ns)
        self.key = _key(self.position)

    @property
    def position(self) -> Position:
        return self.sample.position

    @property
    def committed(self) -> bool:
        """True if it has finished a step of its own: the first one compiles, allocates and fills caches."""
        return self.sample.position.commits > 0

    @property
    def blamed_ns(self) -> int:
        """The time for which it has been idle while others waited for it.

        A rank that has long waited for a hung one is suddenly the last when the others stop sooner than it does.
        """
        return min(self.idle_ns, self.sample.sampled_ns - self.behind_since_ns)

    @property
    def stamped_at(self) -> float:
        """The time of its last stamp, by the detector's clock: those of two hosts cannot be compared."""
        return self.seen_at - (self.sample.sampled_ns - self.position.stamp_ns) / 1e9


class PhaseTimes:
    """The longest time that each phase has taken on any rank, waiting for others not counted."""

    def __init__(self) -> None:
        self._longest_ns: dict[Phase, int] = {}

    def longest_ns(self, phase: Phase) -> int:
        """The longest so far; 0: no such phase has ended."""
        return self._longest_ns.get(phase, 0)

    def learn(self, watch: Watch, at: Position) -> None:
        """A phase ended well: remember how long it may take. A phase that a recovery cut short teaches nothing."""
        before = watch.position
        if not watch.committed or before.phase not in IN_STEP or at.generation != before.generation:
            return
        if at.phase is Phase.PARKED:
            return
        longest = self._longest_ns.get(before.phase, 0)
        self._longest_ns[before.phase] = max(longest, watch.leading_idle_ns)


def note_leaders(ranks: Mapping[int, Watch]) -> None:
    """Note the idle time of the ranks that got least far: they wait for no other, so their phase takes that long."""
    last = min(watch.key for watch in ranks.values())
    for watch in ranks.values():
        if watch.key == last:
            watch.leading_idle_ns = max(watch.leading_idle_ns, watch.idle_ns)
