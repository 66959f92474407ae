"""The detector: which processes have stopped making progress, judged from agents' samples. The controller decides.

A fixed time-out must be longer than anything a script ever does, so it is either useless or wrong. Here a rank is
blamed only if it is idle *and* the others are waiting for it, and what counts as idle is learned from the job's own
phases. A machine that is slow is not a failure: time in which a process wanted a processor and got none does not
count, nor does time without samples (a late sample, a suspended terminal).
"""

from collections.abc import Mapping, Sequence

import msgspec

from relight.core.detection import evidence
from relight.core.detection.pace import SAMPLE_SECONDS, TRACED_RANKS, judge_seconds
from relight.core.detection.sampling import PhaseTimes, Sample, Watch, note_leaders
from relight.core.protocol.events import CommunicationStalled, Event, ProcessSuspected
from relight.core.protocol.position import IN_STEP, Phase

LEARNED_FACTOR = 10  # a phase may take this many times as long as it ever took
BLIND_GAP_NS = 2 * 10**9  # a sample that is later than this is late, and the rest of the pause does not count
FROZEN_GAP_NS = 5 * 10**8  # the same for the state: two samples far apart do not prove that it was stopped between
NEGLIGIBLE_NS = 10**9  # in a large job, a hang may be noticed by so much later
STALE_SECONDS = 10.0  # a rank whose sample is late by more than this is not known well enough to compare with
FORGET_SECONDS = 600.0

_NEVER = frozenset({Phase.PARKED, Phase.STANDBY, Phase.DONE})
# Where no rank gets before Resume. OPTIMIZER is not among them: a recovery may have it finish a step by itself.
_AFTER_RESUME = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.BARRIER, Phase.DONE})


class DetectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the job's settings that suspicions depend on."""

    hang_timeout_seconds: float
    outside_hang_timeout_seconds: float
    startup_timeout_seconds: float
    frozen_timeout_seconds: float


class Detector:
    """Feed it every batch of samples; it returns what the controller should know."""

    def __init__(self, settings: DetectorSettings) -> None:
        self._settings = settings
        self._watched: dict[str, Watch] = {}
        self._suspected: set[str] = set()
        self._members: frozenset[str] = frozenset()
        self._stalled_generation = -1
        self._parked_said_ns = 0  # when it was said the last time that all ranks are parked
        self._phase_times = PhaseTimes()
        self._judged_at = float("-inf")
        # Of a phase that never took longer than this nothing has to be learned: the limits are above what would follow.
        # A large job in which no rank has been idle for so long is not looked at any closer.
        timeouts = (settings.hang_timeout_seconds, settings.outside_hang_timeout_seconds)
        shortest_ns = round(min(*timeouts, settings.startup_timeout_seconds) * 1e9)
        self._negligible_ns = min(NEGLIGIBLE_NS, shortest_ns // LEARNED_FACTOR)
        self._late_ns = BLIND_GAP_NS
        # A rank out of sight may be the one that all wait for: that must be known before another is blamed instead.
        self._stale_seconds = min(STALE_SECONDS, settings.hang_timeout_seconds / 2)
        self._hang_seconds = settings.hang_timeout_seconds

    def expect(self, sample_seconds: float) -> None:
        """A process is sampled so often from now on: with many agents less often, and none of it is late."""
        more = sample_seconds - SAMPLE_SECONDS
        self._late_ns = BLIND_GAP_NS + round(more * 1e9)
        margin = min(STALE_SECONDS, self._settings.hang_timeout_seconds / 2)
        self._stale_seconds = margin + more
        # As without: no rank is blamed before it has been known for a while which ranks are out of sight.
        self._hang_seconds = max(self._settings.hang_timeout_seconds, self._stale_seconds + margin)

    def observe(self, samples: Sequence[Sample], members: Mapping[int, str], now: float) -> tuple[Event, ...]:
        """Take in samples of some processes. `members` names the process of each rank, in the order of ranks.

        Who keeps the others waiting shows only in a look at all ranks. In a large job that is not taken at every
        sample, of which there are as many as agents.
        """
        for sample in samples:
            self._update(sample, now)
        events = [event for sample in samples if (event := self._check_frozen(sample.process))]
        if now - self._judged_at >= judge_seconds(len(members)):
            self._judged_at = now
            events += self._judge(members, now)
        return tuple(events)

    def _judge(self, members: Mapping[int, str], now: float) -> list[Event]:
        watched = self._watched
        ranks = {rank: watched[name] for rank, name in members.items() if name in watched}
        self._excuse_the_bereft(frozenset(members.values()), ranks, now)
        self._forget(now)
        if len(ranks) < len(members) or not ranks:
            return []
        if len(ranks) > TRACED_RANKS and max(watch.idle_ns for watch in ranks.values()) < self._negligible_ns:
            return []
        note_leaders(ranks)
        if any(now - watch.seen_at > self._stale_seconds for watch in ranks.values()):
            return []
        return self._check_hangs(ranks)

    # --- what each sample adds ----------------------------------------------------------------------------------
    def _update(self, sample: Sample, now: float) -> None:
        watch = self._watched.get(sample.process)
        if watch is None:
            since = sample.position.stamp_ns or sample.sampled_ns
            self._watched[sample.process] = Watch(
                sample=sample, seen_at=now, since_ns=since, before_ns=sample.sampled_ns
            )
            return
        before, at = watch.position, sample.position
        gap_ns = max(0, sample.sampled_ns - watch.sample.sampled_ns)
        starved_ns = max(0, sample.run_delay_ns - watch.sample.run_delay_ns)
        blind_ns = max(0, gap_ns - self._late_ns)
        stopped = sample.state == watch.sample.state == "T"
        watch.frozen_ns = watch.frozen_ns + min(gap_ns, FROZEN_GAP_NS) if stopped else 0
        if (at.generation, at.progress, at.stamp_ns) == (before.generation, before.progress, before.stamp_ns):
            watch.excused_ns += max(starved_ns, blind_ns)
        else:
            self._phase_times.learn(watch, at)
            # When within the gap it stamped is not known, so all of the gap's starvation and blindness is excused.
            watch.since_ns = at.stamp_ns
            watch.excused_ns = max(0, min(max(starved_ns, blind_ns), sample.sampled_ns - at.stamp_ns))
            watch.leading_idle_ns = watch.behind_since_ns = 0
        watch.before_ns = watch.sample.sampled_ns
        watch.sample, watch.seen_at = sample, now
        watch.refresh()

    def _forget(self, now: float) -> None:
        gone = [name for name, watch in self._watched.items() if now - watch.seen_at > FORGET_SECONDS]
        for name in gone:
            del self._watched[name]

    def _excuse_the_bereft(self, members: frozenset[str], ranks: Mapping[int, Watch], now: float) -> None:
        """Begin to count anew for the ranks that waited for a rank out of sight, once it has left the job.

        Until its host was given up it was not known which rank all waited for: the others are not blamed for that time.
        """
        left = [self._watched[name] for name in sorted(self._members - members) if name in self._watched]
        if any(now - watch.seen_at > self._stale_seconds for watch in left):
            for watch in ranks.values():
                watch.behind_since_ns = 0
        self._members = members

    # --- judgement ----------------------------------------------------------------------------------------------
    def _check_frozen(self, process: str) -> Event | None:
        watch = self._watched[process]
        if watch.frozen_ns < self._settings.frozen_timeout_seconds * 1e9:
            return None
        text = f"stopped (process state T) for {evidence.seconds(watch.frozen_ns)} in {evidence.where(watch.position)}"
        return self._suspect(process, "frozen", text, watch.frozen_ns)

    def _check_hangs(self, ranks: Mapping[int, Watch]) -> list[Event]:
        limits = {rank: self._limit_ns(watch, ranks) for rank, watch in ranks.items()}
        last = _last(ranks, limits)
        self._note_since_when(ranks, last)
        if any(watch.position.phase is Phase.STANDBY for watch in ranks.values()):
            return []
        if all(watch.position.phase is Phase.PARKED for watch in ranks.values()):
            return self._parked(ranks)
        overdue = {rank: watch for rank, watch in ranks.items() if watch.idle_ns > limits[rank] > 0}
        if len(last) == len(ranks) > 1:
            return self._stalled(ranks) if len(overdue) == len(ranks) else []
        ahead = {rank: watch for rank, watch in ranks.items() if rank not in last}
        newest = max((watch.position.step for watch in ranks.values() if watch.position.phase in IN_STEP), default=-1)
        left = {
            rank: watch
            for rank, watch in ranks.items()
            if watch.position.phase is Phase.DONE and watch.position.version <= newest
        }
        if left and len(left) < len(ranks) and set(overdue) == set(ranks) - set(left):
            return self._left_behind(left, ranks)
        events = []
        for rank, watch in overdue.items():
            if rank in last and watch.blamed_ns > limits[rank]:
                event = self._suspect(ranks[rank].sample.process, "hang", self._hang_evidence(watch, ahead, ranks))
                events += [event] if event else []
        return events

    def _note_since_when(self, ranks: Mapping[int, Watch], last: frozenset[int]) -> None:
        """Note since when each rank has been waited for: at the earliest from the last sample by which it was not.

        If newer samples of the others make a rank the last one by its old sample, that sample cannot blame it: what it
        has done since is not known.
        """
        for rank, watch in ranks.items():
            if rank not in last or len(last) == len(ranks) > 1:
                watch.behind_since_ns, watch.ahead_ns = 0, watch.sample.sampled_ns
            elif not watch.behind_since_ns:
                watch.behind_since_ns = max(watch.since_ns, watch.before_ns, watch.ahead_ns)

    def _limit_ns(self, watch: Watch, ranks: Mapping[int, Watch]) -> int:
        """Return the time for which this process may be idle where it is; 0: forever."""
        settings, phase = self._settings, watch.position.phase
        if phase is Phase.PARKED and self._peers_train(watch, ranks):
            return round(self._hang_seconds * 1e9)
        if phase in _NEVER:
            return 0
        if phase is Phase.OUTSIDE:
            return round(settings.outside_hang_timeout_seconds * 1e9)
        if phase is Phase.STARTING or not watch.committed:
            return round(settings.startup_timeout_seconds * 1e9)
        learned = LEARNED_FACTOR * self._phase_times.longest_ns(phase)
        return max(round(self._hang_seconds * 1e9), learned)

    def _peers_train(self, watch: Watch, ranks: Mapping[int, Watch]) -> bool:
        """True if a peer went on after this one parked: then Resume was sent, and no deadline of the core runs."""
        return any(
            peer.position.phase in _AFTER_RESUME
            and peer.position.generation == watch.position.generation
            and peer.stamped_at > watch.stamped_at
            for peer in ranks.values()
        )

    def _hang_evidence(self, watch: Watch, ahead: Mapping[int, Watch], ranks: Mapping[int, Watch]) -> str:
        limit = evidence.seconds(self._limit_ns(watch, ranks))
        text = f"no progress in {evidence.where(watch.position)} for {evidence.seconds(watch.idle_ns)}"
        if ahead:
            text += f" while {evidence.waiting(ahead)}"
        return f"{text} (limit {limit}{self._hint(watch)})"

    def _hint(self, watch: Watch) -> str:
        return evidence.hint(watch, self._phase_times.longest_ns(watch.position.phase))

    def _stalled(self, ranks: Mapping[int, Watch]) -> list[Event]:
        watches = list(ranks.values())
        generation = watches[0].position.generation
        if generation == self._stalled_generation:
            return []
        self._stalled_generation = generation
        shortest = min(watches, key=lambda watch: watch.idle_ns)
        text = (
            f"no rank made progress for {evidence.seconds(shortest.idle_ns)}: all {len(ranks)} are in "
            f"{evidence.where(shortest.position)}, none behind the others "
            f"(limit {evidence.seconds(self._limit_ns(shortest, ranks))}{self._hint(shortest)})"
        )
        noticed_ns = max(watch.sample.sampled_ns for watch in watches)
        idle_seconds = evidence.beyond_a_step(shortest)
        return [
            CommunicationStalled(
                evidence=text, step=shortest.position.step, noticed_ns=noticed_ns, idle_seconds=idle_seconds
            )
        ]

    def _parked(self, ranks: Mapping[int, Watch]) -> list[Event]:
        """All are parked: perhaps they hung just after Resume. The core ignores this while it has its own deadline."""
        limit_seconds = self._settings.startup_timeout_seconds
        shortest = min(watch.idle_ns for watch in ranks.values())
        noticed_ns = max(watch.sample.sampled_ns for watch in ranks.values())
        if shortest <= limit_seconds * 1e9 or noticed_ns - self._parked_said_ns <= limit_seconds * 1e9:
            return []
        self._parked_said_ns = noticed_ns
        text = f"no rank left PARKED for {evidence.seconds(shortest)}: all {len(ranks)} wait there"
        step = max(watch.position.version for watch in ranks.values())
        return [CommunicationStalled(evidence=text, step=step, noticed_ns=noticed_ns)]

    def _left_behind(self, left: Mapping[int, Watch], ranks: Mapping[int, Watch]) -> list[Event]:
        """Some ranks are through with their loops, the others wait for them in a step."""
        waiting = {rank: watch for rank, watch in ranks.items() if rank not in left}
        generation = next(iter(waiting.values())).position.generation
        if generation == self._stalled_generation:
            return []
        self._stalled_generation = generation
        version = max(watch.position.version for watch in left.values())
        text = (
            f"{evidence.rank_list(sorted(left))} left the loop after {version} steps, but {evidence.waiting(waiting)}: "
            "every rank must take the same number of steps, or `break` after the same one"
        )
        step = max(watch.position.step for watch in waiting.values())
        noticed_ns = max(watch.sample.sampled_ns for watch in waiting.values())
        idle_seconds = evidence.beyond_a_step(min(waiting.values(), key=lambda watch: watch.idle_ns))
        return [CommunicationStalled(evidence=text, step=step, noticed_ns=noticed_ns, idle_seconds=idle_seconds)]

    def _suspect(self, process: str, kind: str, text: str, stopped_ns: int = 0) -> Event | None:
        """A process is suspected once: it will be killed for it."""
        if process in self._suspected:
            return None
        self._suspected.add(process)
        sample = self._watched[process].sample
        return ProcessSuspected(
            process=process,
            kind=kind,
            evidence=text,
            position=sample.position,
            noticed_ns=sample.sampled_ns,
            stopped_seconds=stopped_ns / 1e9,
        )


def _last(ranks: Mapping[int, Watch], limits: Mapping[int, int]) -> frozenset[int]:
    """The ranks that got least far. A rank without a limit is none of them: it waits for the core, or for these."""
    least = min((watch.key for rank, watch in ranks.items() if limits[rank]), default=None)
    return frozenset(rank for rank, watch in ranks.items() if limits[rank] and watch.key == least)
