"""Slow ranks: each rank's own work against the median rank's, window by window."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.core.detection.pace import TRACED_RANKS
from relight.core.detection.sampling import Sample
from relight.core.detection.stragglers import WINDOW_STEPS, WINDOWS, Stragglers, Work, slow_ranks
from relight.core.protocol.events import RankSlow
from relight.core.protocol.position import Position

MS = 10**6
WINDOW_SECONDS = 2.0


class World:
    """Ranks that take a step in every `step_seconds`, and each its own time for the work in it."""

    def __init__(self, work_ms: dict[int, tuple[int, int, int]], ranks_per_host: int = 64) -> None:
        self.work_ms = work_ms
        self.names = {rank: f"w{rank}" for rank in work_ms}
        self.hosts = {rank: f"node-{rank // ranks_per_host}" for rank in work_ms}
        self.positions = {rank: Position(generation=1, rank=rank) for rank in work_ms}
        self.starved_ns = dict.fromkeys(work_ms, 0)
        self.stragglers = Stragglers(1.5, WINDOW_SECONDS)
        self.now = 100.0
        self.found: list[RankSlow] = []

    def steps(self, count: int, step_seconds: float = 0.2) -> list[RankSlow]:
        before = len(self.found)
        for _ in range(count):
            self.now += step_seconds
            for rank, own in self.work_ms.items():
                at = self.positions[rank]
                done = tuple(old + ms * MS for old, ms in zip(at.work_ns, own, strict=True))
                self.positions[rank] = msgspec.structs.replace(at, commits=at.commits + 1, work_ns=done)
            self.sample()
        return self.found[before:]

    def sample(self) -> None:
        samples = [
            Sample(
                process=self.names[rank],
                position=position,
                state="S",
                run_delay_ns=self.starved_ns[rank],
                rss_bytes=0,
                sampled_ns=round(self.now * 1e9),
            )
            for rank, position in self.positions.items()
        ]
        self.found += self.stragglers.observe(samples, self.names, lambda: self.hosts, self.now)

    def window(self) -> list[RankSlow]:
        return self.steps(round(WINDOW_SECONDS / 0.2) + 1)

    def enough(self) -> list[RankSlow]:
        return [event for _ in range(WINDOWS + 1) for event in self.window()]


def test_a_rank_that_is_slow_in_one_phase_is_named_with_the_phase() -> None:
    world = World({0: (30, 60, 10), 1: (90, 60, 10), 2: (31, 60, 10), 3: (30, 61, 10)})
    (event,) = world.enough()
    assert event.process == "w1"
    assert "takes 160 ms a step, 1.6 times that of the median rank" in event.evidence
    assert "most of it in FORWARD (90 ms, the median rank 30 ms)" in event.evidence


def test_it_must_be_slow_in_several_windows_in_a_row() -> None:
    world = World({0: (30, 60, 10), 1: (30, 60, 10), 2: (30, 60, 10)})
    slow, usual = (90, 90, 10), (30, 60, 10)
    world.window()
    for _ in range(3):
        for own in (slow, slow, usual):
            world.work_ms[2] = own
            assert world.window() == []


def test_who_stays_slow_is_named_again_when_a_standby_may_have_come() -> None:
    world = World({0: (30, 60, 10), 1: (90, 60, 10), 2: (30, 60, 10)})
    for _ in range(1 + 3 * WINDOWS):  # the first one only begins
        world.window()
    assert [event.process for event in world.found] == ["w1"] * 3


def test_ranks_that_differ_as_ranks_do_are_not_slow() -> None:
    world = World({rank: (30 + 4 * rank, 60, 10) for rank in range(8)})
    assert world.enough() == []


def test_short_steps_are_not_judged_by_a_millisecond() -> None:
    assert World({0: (1, 1, 0), 1: (3, 2, 0), 2: (1, 1, 0)}).enough() == []


def test_a_recovery_starts_the_window_anew() -> None:
    world = World({0: (30, 60, 10), 1: (90, 60, 10), 2: (30, 60, 10)})
    for generation in range(2, 12):
        world.steps(WINDOW_STEPS // 2)
        for rank, at in world.positions.items():
            world.positions[rank] = msgspec.structs.replace(at, generation=generation)
    assert world.found == []


def test_another_process_is_not_blamed_for_the_one_before() -> None:
    world = World({0: (30, 60, 10), 1: (90, 60, 10), 2: (30, 60, 10)})
    for _ in range(WINDOWS):
        world.window()
    world.names[1] = "w9"
    world.work_ms[1] = (30, 60, 10)
    world.positions[1] = Position(generation=1, rank=1)
    world.found.clear()
    assert world.enough() == []


def test_a_host_whose_ranks_are_all_slow_is_named() -> None:
    own = dict.fromkeys(range(6), (30, 60, 10)) | dict.fromkeys((6, 7), (90, 90, 10))
    events = World(own, ranks_per_host=2).enough()
    assert {event.process for event in events} == {"w6", "w7"}
    assert all("all ranks of node-3" in event.evidence for event in events)


def test_waiting_for_a_processor_is_told() -> None:
    world = World({0: (30, 60, 10), 1: (90, 90, 10), 2: (30, 60, 10)})
    found: list[RankSlow] = []
    for _ in range(50):
        world.starved_ns[1] += 50 * MS
        found += world.steps(1)
    assert "waited for a processor 25% of the time" in found[0].evidence


def test_a_huge_job_is_not_looked_at() -> None:
    own = dict.fromkeys(range(TRACED_RANKS + 1), (1, 1, 1)) | {7: (50, 50, 50)}
    assert World(own).steps(60, step_seconds=1.0) == []


@given(st.dictionaries(st.integers(0, 63), st.floats(0.001, 10.0), max_size=64), st.floats(1.01, 3.0))
def test_never_half_of_the_ranks_or_the_median_one(totals: dict[int, float], factor: float) -> None:
    slow = slow_ranks({rank: Work(seconds=(total, 0.0, 0.0)) for rank, total in totals.items()}, factor)
    assert 2 * len(slow) <= len(totals)
    fast = set(totals) - set(slow)
    assert not slow or min(totals[rank] for rank in slow) > min(totals[rank] for rank in fast)


@pytest.mark.parametrize("ranks", [0, 1])
def test_alone_nobody_is_slow(ranks: int) -> None:
    assert slow_ranks({rank: Work(seconds=(9.0, 9.0, 9.0)) for rank in range(ranks)}, 1.5) == ()


def test_when_no_rank_is_held_nobody_is_slow() -> None:
    """A late sample of a process whose rank is vacant, or after the last one has ended."""
    world = World(dict.fromkeys(range(3), (10, 10, 10)))
    world.window()
    world.names.clear()
    world.now += 2 * WINDOW_SECONDS
    late = Sample(process="w0", position=Position(), state="S", run_delay_ns=0, rss_bytes=0, sampled_ns=1)
    assert world.stragglers.observe([late], world.names, lambda: world.hosts, world.now) == ()
