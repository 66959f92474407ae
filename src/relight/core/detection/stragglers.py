"""Ranks or hosts that have long been slower than their peers. Not a failure: nothing is lost but everybody's time.

In a synchronous step all ranks take the time of the slowest, so whole steps blame no rank. What is compared is each
rank's own work in each phase, without its waiting (training/connection/work.py), as means over windows of many steps:
against the median rank, with the median absolute deviation as the measure of what is usual among the ranks of this job.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from relight.core.detection.pace import TRACED_RANKS
from relight.core.detection.sampling import Sample
from relight.core.protocol.events import RankSlow
from relight.core.protocol.position import Phase

WINDOW_STEPS = 10  # at least
WINDOWS = 3  # in a row
NEGLIGIBLE_SECONDS = 0.005  # a step
USUAL_DEVIATIONS = 6.0
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_NORMAL = 1.4826  # makes a median absolute deviation comparable with a standard deviation


@dataclass(frozen=True)
class Work:
    """Means of one rank over one window: seconds a step in each of `PHASES`."""

    seconds: tuple[float, ...]
    starved: float = 0.0  # share of the window in which it waited for a processor

    @property
    def total(self) -> float:
        return sum(self.seconds)


def slow_ranks(work: Mapping[int, Work], factor: float) -> tuple[int, ...]:
    """Ranks whose own work takes `factor` times that of the median rank, and more than is usual among the others."""
    if len(work) < 2:
        return ()
    totals = {rank: own.total for rank, own in work.items()}
    median = statistics.median_low(totals.values())
    usual = _NORMAL * statistics.median_low(abs(total - median) for total in totals.values())
    least = max(factor * median, median + NEGLIGIBLE_SECONDS, median + USUAL_DEVIATIONS * usual)
    return tuple(rank for rank, total in sorted(totals.items()) if total >= least)


def describe(rank: int, work: Mapping[int, Work], steps: int) -> str:
    """The evidence against one rank, in words."""
    own = work[rank]
    medians = [statistics.median_low(other.seconds[index] for other in work.values()) for index in range(len(PHASES))]
    total = statistics.median_low(other.total for other in work.values())
    worst = max(range(len(PHASES)), key=lambda index: own.seconds[index] - medians[index])
    words = (
        f"its own work takes {own.total * 1e3:.0f} ms a step, {own.total / max(total, 1e-9):.1f} times that of the "
        f"median rank, over {steps} steps; most of it in {PHASES[worst].name} ({own.seconds[worst] * 1e3:.0f} ms, the "
        f"median rank {medians[worst] * 1e3:.0f} ms)"
    )
    return words + (f"; it waited for a processor {own.starved:.0%} of the time" if own.starved >= 0.05 else "")


class Stragglers:
    """Feed it every batch of samples; it returns what the controller should know."""

    def __init__(self, factor: float, window_seconds: float) -> None:
        self._factor = factor
        self._window_seconds = window_seconds
        self._newest: dict[str, Sample] = {}
        self._base: dict[str, Sample] = {}  # at the start of the window
        self._opened_at = float("-inf")
        self._streak: Counter[str] = Counter()  # windows in a row in which a process was slow

    def observe(
        self, samples: Sequence[Sample], members: Mapping[int, str], hosts: Callable[[], Mapping[int, str]], now: float
    ) -> tuple[RankSlow, ...]:
        """`members` names the process of each rank, `hosts` the agents that run them."""
        if len(members) > TRACED_RANKS:
            return ()  # nor is anything kept of so many
        for sample in samples:
            self._newest[sample.process] = sample
        if now - self._opened_at < self._window_seconds:
            return ()
        names = frozenset(members.values())
        if not names:
            return ()  # all are gone: at the end of a job, or in a recovery
        if not names <= self._base.keys() or not names <= self._newest.keys():
            self._open(names, now)  # a process is new
            return ()
        pairs = {rank: (self._base[name], self._newest[name]) for rank, name in members.items()}
        if any(old.position.generation != new.position.generation for old, new in pairs.values()):
            self._open(names, now)  # a recovery: what was done again, or waited for, says nothing
            return ()
        if min(new.position.commits - old.position.commits for old, new in pairs.values()) < WINDOW_STEPS:
            return ()
        work = {rank: _work(old, new) for rank, (old, new) in pairs.items()}
        steps = min(new.position.commits - old.position.commits for old, new in pairs.values())
        self._open(names, now)
        return self._judge(work, members, hosts(), steps)

    def _open(self, names: frozenset[str], now: float) -> None:
        self._newest = {name: sample for name, sample in self._newest.items() if name in names}
        self._base = dict(self._newest)
        self._opened_at = now

    def _judge(
        self, work: Mapping[int, Work], members: Mapping[int, str], hosts: Mapping[int, str], steps: int
    ) -> tuple[RankSlow, ...]:
        slow = slow_ranks(work, self._factor)
        self._streak = Counter({members[rank]: self._streak[members[rank]] + 1 for rank in slow})
        found = []
        for rank in slow:
            if self._streak[members[rank]] % WINDOWS:
                continue
            evidence = describe(rank, work, steps)
            beside = [other for other, host in hosts.items() if host == hosts[rank]]
            if len(beside) > 1 and len(beside) < len(hosts) and set(beside) <= set(slow):
                evidence += f"; so it is on all ranks of {hosts[rank]}"
            found.append(RankSlow(process=members[rank], evidence=evidence))
        return tuple(found)


def _work(old: Sample, new: Sample) -> Work:
    steps = max(1, new.position.commits - old.position.commits)
    elapsed = max(1, new.sampled_ns - old.sampled_ns)
    done = zip(old.position.work_ns, new.position.work_ns, strict=True)
    return Work(
        seconds=tuple(max(0, later - earlier) / steps / 1e9 for earlier, later in done),
        starved=min(1.0, max(0, new.run_delay_ns - old.run_delay_ns) / elapsed),
    )
